"""Scoring holds no logits of many rows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.embedded.sampling.scored_memory import VOCAB
from tinkercloud.embedded.native.compiler import library

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no Linux")
def test_2048_tokens_are_scored_without_the_logits_of_their_rows(tmp_path: Path) -> None:
    """In a process of its own. The logits of 2,048 rows would take 403 MB, those of a block of 128
    25 MB, beside what the rows take anyway: 9 MB in the sampler and 12 to 15 MB in the trainer."""
    command = [sys.executable, "-m", "tests.embedded.sampling.scored_memory", str(tmp_path)]
    child = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    results = json.loads(child.stdout.splitlines()[-1])
    (sampler_bytes, sampled), (trainer_bytes, trained) = results["sampler"], results["trainer"]
    assert sampled == trained < 0
    block_bytes = 128 * VOCAB * 4
    assert sampler_bytes < block_bytes
    assert trainer_bytes < block_bytes
