"""`python -m benchmarks.deviation --quick` runs, and finds what is promised."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import ROOT
from tinkercloud.embedded.native.compiler import library


@pytest.mark.slow
@pytest.mark.skipif(library() is None, reason="there is no C compiler here")
def test_the_quick_form_measures_every_way_to_compute(tmp_path: Path):
    path = tmp_path / "deviation.json"
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.deviation", "--quick", "--json", str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert not process.returncode, process.stderr
    report = json.loads(path.read_text())
    rows = [dict(zip(report["columns"], row, strict=True)) for row in report["rows"]]
    assert len(rows) >= 4
    for row in rows:
        assert row["tokens"] == 32
        assert (row["promised"] == "yes") == (row["computed by"] == "compiled kernels")
        if row["promised"] == "yes":
            assert row["mean"] == row["largest"] == "0"
        assert 0 <= float(row["mean"]) <= float(row["p99"]) <= float(row["largest"]) < 1
