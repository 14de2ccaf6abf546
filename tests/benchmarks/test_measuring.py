"""Arguments and times of a benchmark."""

import math
import shlex
from collections.abc import Sequence

import pytest

from benchmarks.lib.arguments import BenchmarkParser
from benchmarks.lib.timing import alternating, best_s, quantile


def parser() -> BenchmarkParser:
    speed_parser = BenchmarkParser("speed", "What it measures.\n\nAnd how.", quick="less of it")
    speed_parser.add_peers(["ours", "theirs"])
    speed_parser.add_argument("--limit-s", type=float, default=60.0)
    speed_parser.add_argument("names", nargs="*")
    return speed_parser


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("", ""),
        ("--json out.json --peers elsewhere", ""),
        ("--quick", " --quick"),
        ("--limit-s 30 --only ours", " --only ours --limit-s 30.0"),
        ("--limit-s 60", ""),
        ("one two", " one two"),
    ],
)
def test_the_command_of_a_result_has_every_option_that_is_not_the_default(words, command):
    options = parser().parse_args(shlex.split(words))
    assert parser().command(options) == f"python -m benchmarks.speed{command}"


def test_help_says_what_is_measured(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parser().parse_args(["--help"])
    text = capsys.readouterr().out
    assert "What it measures." in text
    assert "And how." not in text


def test_contenders_alternate():
    runs = [(repeat, name) for repeat, name in alternating(["ours", "theirs"], 2)]
    assert runs == [(0, "ours"), (0, "theirs"), (1, "ours"), (1, "theirs")]


def test_the_best_time_is_of_three_runs_at_least_after_one_that_warms_up():
    runs: list[int] = []
    assert best_s(lambda: runs.append(1), seconds=0.0) >= 0
    assert len(runs) == 4


@pytest.mark.parametrize(("values", "expected"), [([1.0, 3.0], 2.0), ([5.0], 5.0), ([], math.nan)])
def test_a_quantile_of_nothing_is_not_a_number(values: Sequence[float], expected: float):
    assert quantile(values, 0.5) == pytest.approx(expected, nan_ok=True)
