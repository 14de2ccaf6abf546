"""What the engine computes on: device, number type, cores."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tinkercloud.decoding.math_kernels import resolve_math_kernels
from tinkercloud.embedded.native.compiler import instruction_set, usable_sets
from tinkercloud.errors import ConfigError


def set_up_torch(num_threads: int) -> None:
    """Before a process computes anything: how many threads PyTorch has, and its kernels."""
    torch.set_num_threads(num_threads)
    resolve_math_kernels()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """For many small products: each ends sooner than two threads have met, and where other work
    keeps the cores busy, waiting for them takes milliseconds. The bits may be others."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def freeze_garbage_collector() -> None:
    """Exclude all objects of the process so far, modules and models, from garbage collection: they
    are never freed, and to traverse them takes tens of milliseconds each time."""
    gc.collect()
    gc.freeze()


def choose_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 where the device multiplies it natively, else float32: there bfloat16 takes
    half of the memory, and its products no less time where many rows go together. Raises
    ConfigError for an unknown name."""
    if name == "auto":
        return torch.bfloat16 if _native_bfloat16(device) else torch.float32
    try:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    except KeyError:
        raise ConfigError(f"dtype {name!r} is not one of auto, float32, bfloat16") from None


def instruction_set_in_use(device: torch.device) -> str:
    """That of the compiled kernels, which are made if need be; "none" where they are not used."""
    return instruction_set() if device.type == "cpu" else "none"


def _native_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return usable_sets()[0].multiplies_bfloat16


def usable_cores() -> int:
    """Cores this process may use: its affinity, and its cgroup's CPU quota where one is set."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    if quota == "max":
        return cores
    return max(1, min(cores, round(int(quota) / int(period))))
