"""MKL's first call of an elementwise function by several threads (see `math_kernels`)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.serving import ROOT
from tinkercloud.decoding.math_kernels import FUNCTIONS, resolve_math_kernels
from tinkercloud.embedded.model.device import set_up_torch

NUM_PROCESSES = 60
ANGLES = """
import torch
from tinkercloud.embedded.model.device import set_up_torch
set_up_torch(2)
angles = torch.arange(1024.0)[:, None] * 10000 ** -(torch.arange(0, 64, 2) / 64)
off = [(f(angles).double() - f(angles.double())).abs().max().item() for f in (torch.cos, torch.sin)]
print(max(off))
"""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_function_is_one_of_torch_on_one_number(name: str) -> None:
    assert getattr(torch, name)(torch.full((1,), 0.5)).shape == (1,)


def test_what_sets_the_threads_resolves_the_kernels() -> None:
    threads = torch.get_num_threads()
    resolve_math_kernels.cache_clear()
    set_up_torch(threads)
    assert resolve_math_kernels.cache_info().currsize == 1


def test_nothing_else_sets_the_threads_of_a_process() -> None:
    files = {
        str(path.relative_to(ROOT))
        for path in Path(ROOT, "tinkercloud").rglob("*.py")
        if re.search(r"torch\.set_num_threads", path.read_text())
    }
    stand_ins = {"tinkercloud/cluster/cpu/engines.py", "tinkercloud/cluster/cpu/ranks.py"}
    assert files - stand_ins == {"tinkercloud/embedded/model/device.py"}


@pytest.mark.slow
def test_angles_are_exact_in_every_one_of_many_processes() -> None:
    """Without `resolve_math_kernels` one process in forty was off by 1.5e-4, on an Intel Xeon with
    AVX-512 and two cores."""
    for _ in range(NUM_PROCESSES):
        command = [sys.executable, "-c", ANGLES]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        assert float(done.stdout) < 1e-7
