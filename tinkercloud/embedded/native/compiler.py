"""The C files beside this one, compiled for this machine at their first use and loaded."""

import ctypes as c
import hashlib
import logging
import platform
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from tinkercloud.config import c_compiler, user_cache_dir
from tinkercloud.embedded.native.structures import Batch, Model, Scan, check_structures

logger = logging.getLogger(__name__)

SOURCES = sorted(Path(__file__).parent.glob("*.c"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC", "-pthread")
COMPILE_LIMIT_S = 120.0


@cache
def library() -> c.CDLL | None:
    """None where there is no C compiler, or it fails; the reason is logged once."""
    try:
        path = _compiled_library()
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "sampling without the compiled forward pass, at a part of its speed: %s", error
        )
        return None
    loaded = c.CDLL(str(path))
    check_structures(loaded)
    loaded.team_new.restype = c.c_void_p
    loaded.team_new.argtypes = (c.c_int,)
    loaded.team_end.argtypes = (c.c_void_p,)
    loaded.forward.argtypes = (c.c_void_p, c.POINTER(Model), c.POINTER(Batch))
    loaded.scan.argtypes = (c.c_void_p, c.POINTER(Scan))
    return loaded


def _compiled_library() -> Path:
    """The shared library of this source, these flags and this processor; compiled where missing."""
    compiler = c_compiler()
    if compiler is None:
        raise FileNotFoundError("there is no C compiler (install gcc or clang, or set CC)")
    what = "\n".join((source(), compiler, *FLAGS, processor()))
    name = f"kernels-{hashlib.sha256(what.encode()).hexdigest()[:24]}.so"
    folder = user_cache_dir()
    if (folder / name).exists():
        return folder / name
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        output = Path(scratch) / name
        command = [compiler, *FLAGS, "-o", str(output), *map(str, SOURCES), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S)
        if done.returncode:
            raise OSError(f"{compiler} failed: {done.stderr.strip()[-500:]}")
        output.replace(folder / name)  # atomic: other processes may compile it too
    return folder / name


@cache
def source() -> str:
    """What is compiled, and what the measured cost of a pass is valid for."""
    return "\n".join(path.read_text() for path in (*SOURCES, *HEADERS))


def processor() -> str:
    """What -march=native depends on, and with it the time of a pass."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))
