"""What a figure depends on: the machine, the versions, the commit."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
"""Of /proc/cpuinfo: the instruction sets that decide how fast products of matrices are."""


def machine() -> dict[str, str | int]:
    """instructions: what the processor has; instruction_set: what our kernels use of it."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Here, because peers' environments, which import this file, have none of our packages.
    from tinkercloud.embedded.native.compiler import instruction_set

    flags = set(_cpuinfo("flags").split())
    return {
        "processor": _cpuinfo("model name") or platform.processor() or "unknown",
        "instructions": " ".join(name for name in INSTRUCTIONS if name in flags),
        "instruction_set": instruction_set(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 1024**3),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions(*packages: str) -> dict[str, str]:
    """The Python version and those of the packages that are installed."""
    numbers = {"python": platform.python_version()}
    for package in packages:
        try:
            numbers[package] = version(package)
        except PackageNotFoundError:
            continue
    return numbers


def commit() -> str:
    """Of the sources that are measured; "+" where files differ from it, "" outside a checkout."""
    try:
        head = _git("rev-parse", "--short=10", "HEAD").strip()
        changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":/*.py", ":/*.c")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{head}+" if changes else head


def _git(*arguments: str) -> str:
    command = ("git", "-C", str(ROOT), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _cpuinfo(field: str) -> str:
    """Of the first processor; "" where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(field))
    return next(values, "")
