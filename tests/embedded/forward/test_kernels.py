"""Our Triton kernels against their plain forms, on a CPU, by Triton's interpreter."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.serving import ROOT
from tinkercloud.embedded.forward.kernel_choice import TOLERANCES

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton has no wheel here")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


def interpreted(expression: str, dtype: torch.dtype) -> dict[str, float]:
    """In a process of its own: kernels are made for the interpreter when they are imported."""
    process = subprocess.run(
        [sys.executable, "-c", f"{IMPORTS}\ndtype = {dtype}\nprint(json.dumps({expression}))"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, cwd=ROOT, timeout=500, check=False,
    )  # fmt: skip
    assert not process.returncode, process.stderr[-3000:]
    return json.loads(process.stdout)


IMPORTS = """
import json, torch
from tests.embedded.forward.projections import largest_difference
from tinkercloud.decoding import philox, philox_kernel
from tinkercloud.embedded.forward import kernel_choice
from tinkercloud.embedded.training import rowwise_choice
cpu = torch.device("cpu")

def wrong_words():
    keys, found = torch.tensor([[0, 0, 0], [-1, 1023, 2**31], [-2**63, 2, 1]]), 0
    for size in (1, 9, 1500):
        words = philox_kernel.random_words(keys, size)
        found += int((words != philox.plain_words(keys, size)).sum())
    return {"random words that are others": found}
"""


@NEEDS_TRITON
@DTYPES
def test_parts_of_training_attention_and_random_numbers_are_the_plain_ones(dtype: torch.dtype):
    parts = (
        "rowwise_choice.differences(cpu, dtype)",
        "kernel_choice.attention_differences(cpu, dtype)",
        "wrong_words()",
    )
    largest = interpreted(" | ".join(parts), dtype)
    assert len(largest) == {torch.float32: 10, torch.float16: 14}[dtype]
    assert max(largest.values()) <= TOLERANCES[dtype], largest


@pytest.mark.slow
@NEEDS_TRITON
@DTYPES
def test_every_kernel_of_a_step_computes_what_its_plain_form_does(dtype: torch.dtype):
    projections = "{'projections': largest_difference(cpu, dtype)}"
    largest = interpreted(f"kernel_choice.differences(cpu, dtype) | {projections}", dtype)
    assert len(largest) == 7
    assert max(largest.values()) <= TOLERANCES[dtype], largest
