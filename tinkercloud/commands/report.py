"""`tinkercloud report`: the figures that a training script writes to a file, in the console."""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from tinkercloud.commands.options import Arguments, complain, say

POLL_S = 2.0

Point = tuple[int, dict[str, float]]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_id", metavar="RUN", help="the training run, as the console names it")
    parser.add_argument(
        "file",
        type=Path,
        help="lines of JSON objects with a `step`, as tinker-cookbook's metrics.jsonl has them",
    )
    parser.add_argument(
        "--follow", action="store_true", help="go on with lines that are added, until interrupted"
    )
    parser.add_argument("--base-url", help="the server; else TINKER_BASE_URL")
    parser.add_argument("--api-key", help="its key; else TINKER_API_KEY")
    parser.set_defaults(run=run)


def run(arguments: Arguments) -> int:
    from tinker_gmi.connection.errors import TinkerError
    from tinker_gmi.run_metrics import RunMetrics

    path: Path = arguments["file"]
    try:
        with (
            path.open(encoding="utf-8") as file,
            RunMetrics(arguments["base_url"], arguments["api_key"]) as metrics,
        ):
            for points in _points(file, follow=arguments["follow"]):
                metrics.report_many(arguments["run_id"], points)
                say(f"reported {len(points)} lines, the last of step {points[-1][0]}")
    except (OSError, ValueError) as error:
        complain(f"{path}: {error}")
        return 1
    except TinkerError as error:
        complain(error.message)
        return 1
    return 0


def _points(file: IO[str], *, follow: bool) -> Iterator[list[Point]]:
    """Of the lines that there are, then of those that come. Raises ValueError for a line that is no
    JSON object."""
    num_read, rest = 0, ""
    while True:
        *lines, rest = (rest + file.read()).split("\n")
        if not follow:  # the last line may have no end
            lines.append(rest)
        numbered = enumerate(lines, num_read + 1)
        points = [point for at, line in numbered if (point := _point(at, line)) is not None]
        if points:
            yield points
        if not follow:
            return
        num_read += len(lines)
        time.sleep(POLL_S)


def _point(number: int, line: str) -> Point | None:
    """None: the line is about no step, or has no number."""
    if not line.strip():
        return None
    try:
        fields: Any = json.loads(line)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(f"line {number} is no JSON object: {line[:80]}")
    step = fields.pop("step", None)
    numbers = {n: float(v) for n, v in fields.items() if type(v) in (int, float)}
    return (step, numbers) if type(step) is int and numbers else None
