"""`pool doctor`, `benchmark` and `tune`, with fakes of llama.cpp's programs."""

import json
import socket
from pathlib import Path

import pytest

from tests.pool.pools import Pool
from tinkercloud.pool.pool_file import load_pool
from tinkercloud.pool.tuning import candidate_splits


def test_doctor_finds_nothing_missing_in_a_pool_that_can_run(pool: Pool) -> None:
    values = json.loads(pool.file.read_text())
    values["models"] = values["models"][:1]
    pool.file.write_text(json.dumps(values))
    done = pool.command("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "llama-server sees 2 devices" in done.stdout
    assert "a: up after" in done.stdout and "small: a/CPU" in done.stdout


def test_doctor_says_what_is_missing_and_what_to_do(pool: Pool) -> None:
    values = json.loads(pool.file.read_text())
    values["workers"][1]["gpus"] = [{"device": "CUDA9"}]
    pool.file.write_text(json.dumps(values))
    with socket.create_server(("127.0.0.1", values["coordinator"]["port"])):
        done = pool.command("doctor")
    assert done.returncode == 1
    assert "end the program that listens there" in done.stdout
    assert "unknown device: CUDA9" in done.stdout
    assert "missing huge" in done.stdout and "add a worker or memory" in done.stdout


def test_a_pool_is_measured_and_tuned(pool: Pool, tmp_path: Path) -> None:
    assert "does not run" in pool.command("benchmark").stderr
    assert pool.command("start").returncode == 0
    assert "the pool runs" in pool.command("doctor").stderr
    out = tmp_path / "figures.json"
    done = pool.command("benchmark", "--requests", "3", "--json", str(out))
    assert done.returncode == 0 and "over 3 requests" in done.stdout
    figures = json.loads(out.read_text())
    assert figures["completed"] == 3 and figures["failures"] == {}
    assert figures["tokens_per_s"] == pytest.approx(3 * 64 / figures["wall_s"])
    failing = pool.command("benchmark", "--requests", "3", "--tokens", "13")
    assert failing.returncode == 1 and "3 failed: {'status 500': 3}" in failing.stdout
    tuned = pool.command("tune", "--requests", "1", "--write")
    assert tuned.returncode == 0, tuned.stderr
    for text in ("by memory: ", "equal: ", "device 1 alone: ", "device 2 alone: ", "fastest: "):
        assert text in tuned.stdout
    fastest = tuned.stdout.partition("fastest: ")[2].partition(",")[0]
    splits = dict(candidate_splits([memory for _, memory in pool.state.devices]))
    assert load_pool(pool.file).model("small").tensor_split == splits[fastest]


def test_candidates_give_each_device_its_place() -> None:
    splits = dict(candidate_splits([2 * 2**30, 2**30, 0]))
    assert splits["by memory"] is None
    assert splits["device 2 alone"] == (0.0, 1.0, 0.0)
    assert splits["without device 1"] == (0.0, 1.0, 0.0)
    assert dict(candidate_splits([5])) == {"by memory": None}
