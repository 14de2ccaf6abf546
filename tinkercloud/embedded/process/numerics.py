"""Which bits an engine computes, in words: engines with the same words compute the same ones."""

import hashlib
import platform
import re
from pathlib import Path

import torch

from tinkercloud.embedded.model.device import choose_device
from tinkercloud.embedded.native.compiler import (
    flags_in_use,
    instruction_set,
    library,
    processor,
    source,
)

_COMPILERS = re.compile(rb"(?:GCC: |clang version )[^\0]+")
"""As compilers sign a library; its other bytes depend on where the sources lay."""


SUMS = 2
"""Counts the orders of sums outside the kernels, of gradients for example: whoever changes one
counts on, since nothing else would say that runs of before are computed otherwise."""


def numerics(dtype: str) -> str:
    """For example "avx2 bfloat16 sums-2 torch-2.13.0+cpu-avx2 glibc-2.39 kernels-1a2b3c4d"."""
    capability = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "-")
    c_library = "-".join(filter(None, platform.libc_ver()))
    build = f"{dtype} sums-{SUMS} torch-{torch.__version__}-{capability} "
    build += c_library or platform.system()
    device = choose_device()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device).replace(" ", "-")
        return f"{name} {build} cuda-{torch.version.cuda}"
    loaded = library()
    if loaded is None:
        # PyTorch chooses its products by the processor's model, and splits sums by threads
        return f"{_digest(processor())} {build} threads-{torch.get_num_threads()}"
    content = Path(loaded._name).read_bytes()
    compilers = sorted({each.decode(errors="replace") for each in _COMPILERS.findall(content)})
    made_of = "\n".join((source(), *flags_in_use(), *compilers))
    return f"{instruction_set()} {build} kernels-{_digest(made_of)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
