"""`tinkercloud proxy`: OpenAI's API over drafters and a target that verifies their drafts."""

import argparse
import logging
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tinkercloud import logs
from tinkercloud.commands.options import Arguments, add_settings, config_of, say
from tinkercloud.errors import ConfigError

if TYPE_CHECKING:
    from tinkercloud.proxy.drafters import DraftSource
    from tinkercloud.proxy.opening import ProxyOptions

SETTINGS = (*("log_level", "log_format", "max_connections", "head_timeout_s", "body_timeout_s"),)
LISTEN = "127.0.0.1:8720"
SUFFIX = "suffix"
BODY_BYTES = 8 * 1024 * 1024


def add_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option(
        "--target",
        required=True,
        metavar="URL[#MODEL]",
        help="the server whose samples are given out, by the base URL that OpenAI's clients take",
    )
    option(
        "--draft",
        action="append",
        default=[],
        metavar="URL[#MODEL]",
        help="a server that drafts; suffix: no server, a sample's own text; several times: several",
    )
    option(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="the target's: tokenizer.json, chat template",
    )
    option("--target-key-file", type=Path, help="holds the key that the target asks for")
    option("--draft-key-file", type=Path, help="holds the key that the drafters ask for")
    option("--listen", default=LISTEN, metavar="HOST:PORT", help=f"[{LISTEN}]")
    option("--key-file", type=Path, help="holds the key that clients have to send")
    option("--drafted-tokens", type=_positive, default=16, help="of a round, at most [16]")
    option(
        "--several",
        choices=("race", "consensus"),
        default="race",
        help="of several drafters: the first draft, or what most of them agree on [race]",
    )
    option("--draft-timeout-s", type=float, default=2.0, help="for a draft [2]")
    option("--allow-private", action="store_true", help="upstreams with private addresses")
    option("--max-requests", type=_positive, default=256, help="underway at a time [256]")
    option("--max-body-bytes", type=_positive, default=BODY_BYTES, help=f"[{BODY_BYTES}]")
    option("--max-prompt-tokens", type=_positive, default=131_072, help="[131072]")
    option("--max-output-tokens", type=_positive, default=32_768, help="[32768]")
    add_settings(parser, SETTINGS)
    parser.set_defaults(run=run)


def run(arguments: Arguments) -> int:
    from tinkercloud import server
    from tinkercloud.addresses import parse_address, read_key
    from tinkercloud.proxy.app import create_proxy_app
    from tinkercloud.proxy.opening import opened
    from tinkercloud.speculative.remote.connection import ServerSecurity

    config = config_of(arguments)
    logs.configure(config.log_level, config.log_format)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else it logs every round
    address = parse_address(arguments["listen"])
    key_file: Path | None = arguments["key_file"]
    key = None if key_file is None else read_key(key_file)
    ServerSecurity(key).check(address)
    options = _options(arguments)
    config = replace(config, host=address.host, port=address.port)
    with closing(server.listen(config)) as listener:
        url = server.base_url(listener)
        app = create_proxy_app(lambda: opened(options, say), key)

        async def ready() -> None:
            say(f"dashboard: {url}/dashboard")
            say(f"ready: {url}/v1")

        async def stopping(_: bool) -> None:
            """Streams end with their connections."""

        server.run(app, config, listener, server.Hooks(ready, stopping))
    return 0


def _options(arguments: Arguments) -> "ProxyOptions":
    """Raises ConfigError."""
    from tinkercloud.addresses import read_key
    from tinkercloud.proxy.opening import ProxyOptions
    from tinkercloud.proxy.service import ProxyLimits
    from tinkercloud.proxy.upstream import UpstreamAddress

    def key(name: str) -> str | None:
        return None if arguments[name] is None else read_key(arguments[name])

    drafts: list[str] = arguments["draft"]
    if arguments["draft_timeout_s"] <= 0:
        raise ConfigError("--draft-timeout-s must be above 0")
    limits = ("max_requests", "max_body_bytes", "max_prompt_tokens", "max_output_tokens")
    return ProxyOptions(
        target=UpstreamAddress.parse(arguments["target"]),
        drafts=tuple(UpstreamAddress.parse(draft) for draft in drafts if draft != SUFFIX),
        local=_local(drafts),
        tokenizer=arguments["tokenizer"],
        target_key=key("target_key_file"),
        draft_key=key("draft_key_file"),
        most_drafted=arguments["drafted_tokens"],
        together=arguments["several"],
        draft_timeout_s=arguments["draft_timeout_s"],
        allow_private=arguments["allow_private"],
        limits=ProxyLimits(**{name: arguments[name] for name in limits}),
    )


def _local(drafts: list[str]) -> "tuple[DraftSource, ...]":
    if SUFFIX not in drafts:
        return ()
    from tinkercloud.proxy.suffix_source import SuffixSource

    return (SuffixSource(),)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value
