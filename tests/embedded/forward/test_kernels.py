"""Our Triton kernels against their plain forms, on a CPU, by Triton's interpreter.

Needs Triton (`pip install triton`), which the CPU build of torch comes without.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.serving import ROOT
from tinkercloud.embedded.forward.kernel_choice import TOLERANCES

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton")

# In a process of its own: kernels are made for the interpreter when they are imported.
SCRIPT = """
import json, torch
from tests.embedded.forward.projections import largest_difference
from tinkercloud.decoding import philox, philox_kernel
from tinkercloud.embedded.forward.kernel_choice import differences
from tinkercloud.embedded.training import rowwise_choice
cpu = torch.device("cpu")
largest = {str(d): differences(cpu, d) for d in (torch.float32, torch.float16)}
keys = torch.tensor([[0, 0, 0], [-1, 1023, 2**31], [-2**63, 2, 1]])
for size in (1, 9, 1500):
    words = philox_kernel.random_words(keys, size)
    assert torch.equal(words, philox.plain_words(keys, size)), size
for name, found in largest.items():
    dtype = getattr(torch, name.removeprefix("torch."))
    found["projections"] = largest_difference(cpu, dtype)
    found |= rowwise_choice.differences(cpu, dtype)
print(json.dumps(largest))
"""


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, float]]:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False,
    )  # fmt: skip
    assert not process.returncode, process.stderr[-3000:]
    return json.loads(process.stdout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_kernel_computes_what_its_plain_form_does(
    interpreted: dict[str, dict[str, float]], dtype: torch.dtype
):
    largest = interpreted[str(dtype)]
    assert len(largest) == {torch.float32: 14, torch.float16: 18}[dtype]
    assert max(largest.values()) <= TOLERANCES[dtype], largest
