"""`tinkercloud top`: what a running server does, at the terminal."""

import argparse
import os
import time
from typing import TYPE_CHECKING

from tinkercloud.commands.metric_readings import Interval, Reading
from tinkercloud.commands.options import Arguments, say
from tinkercloud.errors import UserError

if TYPE_CHECKING:
    import httpx

HERE = "http://127.0.0.1:8700"
SHORTEST_S = 0.2


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help=f"the server [TINKER_BASE_URL, else {HERE}]")
    parser.add_argument(
        "--key",
        help="an API key; an administrator's or one of the user metrics sees all [TINKER_API_KEY]",
    )
    parser.add_argument(
        "--interval-s", type=float, default=2.0, help="seconds between two readings [2]"
    )
    parser.add_argument(
        "--once", action="store_true", help="show one interval as plain text, and end"
    )
    parser.set_defaults(run=run)


def run(arguments: Arguments) -> int:
    import httpx

    url = arguments["url"] or os.environ.get("TINKER_BASE_URL") or HERE
    key = arguments["key"] or os.environ.get("TINKER_API_KEY") or ""
    interval_s: float = arguments["interval_s"]
    if not interval_s >= SHORTEST_S:
        raise UserError(f"--interval-s is {interval_s:g}; it must be at least {SHORTEST_S:g}")
    # The environment's proxies are for elsewhere.
    with httpx.Client(base_url=url, headers={"X-API-Key": key}, trust_env=False) as http:
        if arguments["once"]:
            return _once(http, interval_s)
        return _live(http, interval_s)


def _once(http: "httpx.Client", interval_s: float) -> int:
    from rich.console import Console

    from tinkercloud.commands.top_view import view

    before = _read(http)
    time.sleep(interval_s)
    console = Console(width=120, no_color=True)
    with console.capture() as capture:
        console.print(view(str(http.base_url), Interval(before, _read(http))))
    say(capture.get().rstrip())
    return 0


def _live(http: "httpx.Client", interval_s: float) -> int:
    """Until Ctrl-C."""
    from rich.live import Live

    from tinkercloud.commands.top_view import view

    url, before = str(http.base_url), _read(http)
    with Live(view(url, Interval(before, before)), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            after = _read(http)
            live.update(view(url, Interval(before, after)), refresh=True)
            before = after


def _read(http: "httpx.Client") -> Reading:
    """Raises UserError where there is no server, or the key is not one of its."""
    import httpx

    try:
        answer = http.get("/metrics")
    except httpx.HTTPError as error:
        raise UserError(
            f"no server answers at {http.base_url}: {error}; name another with --url"
        ) from error
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise UserError(
            f"{http.base_url} refuses the key; make one with `tinkercloud keys add metrics` there, "
            "and give it by --key or TINKER_API_KEY"
        )
    if answer.status_code != httpx.codes.OK:
        raise UserError(f"{http.base_url} answered /metrics with {answer.status_code}")
    return Reading.of(answer.text, time.monotonic())
