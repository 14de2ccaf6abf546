"""`tinkercloud top`, against a real server; and what it computes of two readings."""

import re
import subprocess
import sys

import pytest
import tinker

from tests import serving
from tinkercloud.cli import main
from tinkercloud.commands.metric_readings import Interval, Reading

NAME = "tinkercloud_operation_phase_seconds"


def top(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tinkercloud", "top", "--once", "--interval-s", "0.3"]
    env = {**serving.QUIET, "PATH": "", "PYTHONPATH": str(serving.ROOT), **environment}
    return subprocess.run(
        [*command, *arguments], env=env, capture_output=True, text=True, timeout=300
    )


def test_once_shows_what_ended_in_the_interval(sdk_server: serving.Server) -> None:
    arguments = ("--url", sdk_server.base_url, "--key", sdk_server.api_key)
    idle = top(*arguments)
    assert (idle.returncode, idle.stderr) == (0, "")
    assert f"tinkercloud {sdk_server.base_url}" in idle.stdout
    assert not re.search(r"^Sample\b", idle.stdout, re.M)
    service = tinker.ServiceClient()
    sampler = service.create_sampling_client(base_model="fake/tiny").result()
    prompt = tinker.ModelInput.from_ints([1, 2, 3])
    params = tinker.SamplingParams(max_tokens=4, temperature=0.0, stop=[])
    watching = subprocess.Popen(
        [sys.executable, "-m", "tinkercloud", "top", "--once", "--interval-s", "3", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=serving.ROOT,
    )
    while watching.poll() is None:
        sampler.sample(prompt, num_samples=1, sampling_params=params).result()
    assert watching.stdout is not None
    shown = watching.stdout.read()
    watching.stdout.close()
    row = re.search(
        r"^Sample +\d+ +\d+ +(?:-|[\d.]+ m?s) +([\d.]+) +0\.0( +[\d.]+ m?s){4}$", shown, re.M
    )
    assert row is not None, shown
    assert float(row[1]) > 0
    user = re.search(r"^default +([\d.]+) +0 +([\d,]+) +([\d,]+)", shown, re.M)
    assert user is not None, shown
    assert float(user[1]) > 0


def test_a_key_that_is_refused_and_a_server_that_is_not_there_are_sentences(
    sdk_server: serving.Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--once", "--url", sdk_server.base_url, "--key", "tml-no"]) == 1
    assert (
        "refuses the key; make one with `tinkercloud keys add metrics`" in capsys.readouterr().err
    )
    assert main(["top", "--once", "--url", "http://127.0.0.1:9", "--key", "tml-no"]) == 1
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err
    assert main(["top", "--once", "--interval-s", "0"]) == 1
    assert "--interval-s is 0; it must be at least 0.2" in capsys.readouterr().err


def reading(taken_s: float, *lines: str) -> Reading:
    return Reading.of("\n".join([*lines, ""]), taken_s)


def test_a_rate_is_the_increase_per_second_also_over_a_restart() -> None:
    line = '# TYPE n counter\nn_total{{kind="a",user="x"}} {}\nn_total{{kind="a",user="y"}} {}'
    interval = Interval(reading(10, line.format(5, 7)), reading(12, line.format(9, 3)))
    assert interval.rates("n_total", "user") == {("x",): 2.0, ("y",): 1.5}
    assert interval.rates("n_total", "kind") == {("a",): 0.0}


def test_a_quantile_is_of_the_interval_alone() -> None:
    def buckets(*counts: int) -> list[str]:
        bounds = ("0.1", "0.2", "+Inf")
        lines = [f'{NAME}_bucket{{le="{b}"}} {c}' for b, c in zip(bounds, counts, strict=True)]
        return [f"# TYPE {NAME} histogram", *lines, f"{NAME}_count {counts[-1]}", f"{NAME}_sum 1"]

    interval = Interval(reading(0, *buckets(90, 90, 90)), reading(1, *buckets(90, 100, 100)))
    assert interval.quantile(0.5, NAME) == pytest.approx(0.15)
    assert Interval(interval.after, interval.after).quantile(0.5, NAME) is None
    above = Interval(reading(0, *buckets(0, 0, 0)), reading(1, *buckets(0, 0, 4)))
    assert above.quantile(0.99, NAME) == pytest.approx(0.2)
