"""How much memory is free for the engine: of its GPU, or of its machine or container."""

import os
from pathlib import Path

import torch

_GROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device, limit_bytes: int | None) -> int | None:
    """What can be taken now; None where the system does not say. limit_bytes: for all that this
    process has, if it is limited."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        limits = [free + unused]
        used = torch.cuda.memory_allocated(device)
    else:
        limits = [each for each in (_of_machine(), _of_group()) if each is not None]
        used = _resident()
    if limit_bytes is not None:
        limits.append(limit_bytes - used)
    return max(0, min(limits)) if limits else None


def _of_machine() -> int | None:
    for line in _lines(Path("/proc/meminfo")):
        name, _, kib = line.partition(":")
        if name == "MemAvailable":
            return int(kib.split()[0]) * 1024
    return None


def _of_group() -> int | None:
    """Of the control group, as it is seen in a container. Pages of files that nobody has used for a
    while are free: the kernel takes them when it needs them."""
    limit, used = _lines(_GROUP / "memory.max"), _lines(_GROUP / "memory.current")
    if not (limit and used and limit[0].isdigit() and used[0].isdigit()):
        return None
    words = (line.split() for line in _lines(_GROUP / "memory.stat"))
    inactive = next((int(number) for name, number in words if name == "inactive_file"), 0)
    return int(limit[0]) - int(used[0]) + inactive


def _resident() -> int:
    pages = _lines(Path("/proc/self/statm"))
    return int(pages[0].split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
