"""`python -m benchmarks.gpu` runs: on a CPU with tiny shapes, and without a GPU it says so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.serving import ROOT


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_tiny_shapes_are_checked_and_measured_on_a_cpu(tmp_path: Path):
    process = run("--device", "cpu", "--json", str(tmp_path / "gpu.json"))
    assert not process.returncode, process.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert len(report["rows"]) == 2 * (3 + 1) + 1 + 2, "ours and the peers'"
    for row in report["rows"]:
        assert len(row) == len(report["columns"])
        assert row[3] > 0, row
        assert 0 < row[-2] < 2, row
    assert len(report["targets"]) == 2 + 2 + 1


@pytest.mark.slow
def test_a_trace_of_streams_is_written_and_shows_no_kernels_of_a_cpu(tmp_path: Path):
    path = tmp_path / "trace.json"
    process = run("--device", "cpu", "--trace", str(path))
    assert not process.returncode, process.stderr
    assert process.stdout == "the trace has no kernels: this device has one stream\n"
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    assert "role draft" in names


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path):
    process = run("--json", str(tmp_path / "gpu.json"))
    assert not process.returncode
    assert process.stdout == "there is no CUDA device here: nothing is measured\n"
    assert not (tmp_path / "gpu.json").exists()
