"""Compiles the C files of kernels/, for one instruction set, into a shared library.

-ffp-contract=off: a product and a sum are fused where the source says so (vectors.h), else bits
would depend on which of them a compiler happens to see together.
"""

import hashlib
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from tinkercloud.embedded.native.instruction_sets import InstructionSet

HERE = Path(__file__).parent
CARRIED = HERE / "compiled"  # the libraries that a wheel brings
KERNELS = HERE / "kernels"
SOURCES = sorted(KERNELS.rglob("*.c"))
HEADERS = sorted(KERNELS.rglob("*.h"))
FLAGS = ("-O3", "-fno-math-errno", "-ffp-contract=off", "-fPIC", "-pthread")
# -Bsymbolic: no function of ours is replaced by another library's of the same name.
LINK_FLAGS = ("-shared", "-pthread", "-Wl,-Bsymbolic")
TIME_LIMIT_S = 600.0  # of the clock: a file takes minutes where others compute too


@cache
def source() -> str:
    """What is compiled, and what the measured cost of a pass is valid for."""
    return "\n".join(path.read_text() for path in (*SOURCES, *HEADERS))


def compiler_flags(chosen: InstructionSet) -> tuple[str, ...]:
    return (*FLAGS, *chosen.flags, f'-DINSTRUCTION_SET="{chosen.name}"')


def file_name(chosen: InstructionSet, compiler: str = "") -> str:
    """Of the library of these sources. compiler: where it is kept beside those of others."""
    content = "\n".join((source(), compiler, *compiler_flags(chosen), *LINK_FLAGS))
    return f"kernels-{chosen.name}-{hashlib.sha256(content.encode()).hexdigest()[:24]}.so"


def compiled(chosen: InstructionSet, compiler: str, folder: Path) -> Path:
    """The library in `folder`; compiled where it is missing. OSError: it cannot be."""
    path = folder / file_name(chosen, compiler)
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        output = Path(scratch) / path.name
        compile_library(chosen, compiler, output)
        output.replace(path)  # atomic: other processes may compile it too
    return path


def compile_library(chosen: InstructionSet, compiler: str, output: Path) -> None:
    """Object files in parallel, beside `output`, then the library. OSError: the compiler fails."""
    objects = [output.with_name(f"{source.stem}.o") for source in SOURCES]
    compiling = (compiler, *compiler_flags(chosen), "-c", "-o")
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        runs = [
            threads.submit(_run, *compiling, str(target), str(path))
            for path, target in zip(SOURCES, objects, strict=True)
        ]
    for run in runs:
        run.result()
    _run(compiler, *LINK_FLAGS, "-o", str(output), *map(str, objects), "-lm")


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} took more than {TIME_LIMIT_S:.0f} s") from error
    if done.returncode:
        raise OSError(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
