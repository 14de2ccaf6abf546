"""Facts of the machine, for probes.py: they need no package, but what Linux says of itself."""

import contextlib
import os
import resource
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

INSTRUCTIONS = {  # flags of /proc/cpuinfo for which kernels are written -> their usual names
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 bfloat16",
    "amx_bf16": "AMX bfloat16",
}


def host(data_dir: str, address: str, port: str) -> dict[str, Any]:
    """Limits and devices of this machine. memlock_bytes, open_files: -1 is unlimited."""
    folder = Path(data_dir)
    while not folder.exists():
        folder = folder.parent
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "disk_free_bytes": shutil.disk_usage(folder).free,
        "writable": os.access(folder, os.W_OK),
        "shm_bytes": shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        "open_files": open_files[1],
        "memlock_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "interfaces": _interfaces(),
        "port_error": _port_error(address, int(port)),
        "processor": _processor(),
        "memory": _memory(),
    }


def _processor() -> dict[str, Any]:
    """Of the first core; {} where Linux does not say."""
    lines = _lines(Path("/proc/cpuinfo"))
    fields = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    if "flags" not in fields:
        return {}
    flags = set(fields["flags"].split())
    names = [name for flag, name in INSTRUCTIONS.items() if flag in flags]
    return {"model": fields.get("model name", ""), "instructions": names}


def _memory() -> dict[str, int]:
    """Bytes, the control group's where it has a limit; {} where Linux does not say."""
    lines = [line.split() for line in _lines(Path("/proc/meminfo"))]
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}
    if "MemAvailable" not in kib:
        return {}
    total, free = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    limit, used = (
        _lines(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current")
    )
    if limit and used and limit[0].isdigit() and used[0].isdigit():
        total, free = min(total, int(limit[0])), min(free, int(limit[0]) - int(used[0]))
    return {"total_bytes": total, "free_bytes": max(0, free)}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _interfaces() -> list[str]:
    up: list[str] = []
    for folder in sorted(Path("/sys/class/net").glob("*")):
        with contextlib.suppress(OSError):
            # loopback says "unknown" and counts as none
            if (folder / "operstate").read_text().strip() == "up" or folder.name.startswith("ib"):
                up.append(folder.name)
    return up


def _port_error(address: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        # As the server binds: a port whose last connections are still closing is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def driver() -> dict[str, Any]:
    """By nvidia-smi."""
    fields = "driver_version,name,memory.total,compute_cap"
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    if done.returncode:
        output = (done.stdout + done.stderr).strip().splitlines()
        return {"error": f"nvidia-smi ended with status {done.returncode}: {' '.join(output[:1])}"}
    gpus = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return {"version": gpus[0].split(",")[0] if gpus else "", "gpus": gpus}
