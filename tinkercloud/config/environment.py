"""What the environment decides beside the settings: folders, the compiler, threads."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from tinkercloud.config.setting import ENV_PREFIX
from tinkercloud.config.tree import Config

_INSTRUCTION_SET = ENV_PREFIX + "ENGINE_INSTRUCTION_SET"
_ENGINE_KEY = ENV_PREFIX + "SGLANG_KEY"
_SHARED_MEMORY = ENV_PREFIX + "SHARED_MEMORY"
_STAND_INS = ENV_PREFIX + "SGLANG_STAND_INS"

KEPT_BYTES = 1024**3


def default_data_dir() -> Path:
    """Where data lives when only the environment has a say."""
    folder = os.environ.get(ENV_PREFIX + "DATA_DIR")
    return Path(folder).expanduser().absolute() if folder else Config().data_dir


def nccl_variables() -> dict[str, str]:
    """What the environment tells NCCL."""
    return {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}


def user_cache_dir() -> Path:
    """Where what can be made again is kept between runs, whatever the data directory."""
    folder = os.environ.get("XDG_CACHE_HOME")
    return Path(folder) / "tinkercloud" if folder else Path.home() / ".cache" / "tinkercloud"


def c_compiler() -> str | None:
    """What CC names, or the system's; None where there is none."""
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")


def forced_instruction_set() -> str:
    """The setting `engine.instruction_set`, for whatever process computes with compiled kernels."""
    return os.environ.get(_INSTRUCTION_SET, "auto")


def force_instruction_set(name: str) -> None:
    """For this process and those that it starts, before the first use of compiled kernels."""
    os.environ[_INSTRUCTION_SET] = name


def thread_environment() -> dict[str, str]:
    """The environment of a process that computes on the CPU.

    Its OpenMP threads wait for each other awake for a few microseconds and then sleep. The default
    is to stay awake, which makes every matrix product several times slower as soon as another
    process wants the same cores; without those microseconds, small operations take three times as
    long.
    """
    return {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000", **os.environ}


def engine_environment() -> dict[str, str]:
    """The environment of the engine process.

    glibc keeps what a micro-batch has freed, up to KEPT_BYTES, for the next one, which would
    otherwise wait for the system's new pages (600,000 of them in a batch of 6,000 tokens). The
    engine gives it back in quiet time.
    """
    kept = str(KEPT_BYTES)
    keeping = {"MALLOC_TRIM_THRESHOLD_": kept, "MALLOC_MMAP_THRESHOLD_": kept}
    return keeping | thread_environment()


def with_engine_key(environment: Mapping[str, str], key: str) -> dict[str, str]:
    """The environment of an SGLang process that answers only who has the key. Not an argument of
    its command: every user of a machine can read those."""
    return {**environment, _ENGINE_KEY: key}


def engine_key() -> str | None:
    """Of this process, where it has one; the processes that it starts are not given it."""
    return os.environ.pop(_ENGINE_KEY, None)


def with_shared_memory(folder: Path) -> dict[str, str]:
    """The environment of a command whose files of shared memory are to lie in that folder."""
    return {**os.environ, _SHARED_MEMORY: str(folder)}


def shared_memory_folder() -> Path | None:
    """Where this process is to make files of shared memory; None: wherever it likes."""
    folder = os.environ.get(_SHARED_MEMORY)
    return Path(folder) if folder else None


def disable_torch_compiler() -> None:
    """For this process, before torch's compiler is imported."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"


def stand_ins_variables(start_method: Literal["fork", "spawn"] = "fork") -> dict[str, str]:
    """For an SGLang engine that is to run without a GPU; start_method: of its processes."""
    return {_STAND_INS: start_method, "SGLANG_USE_CPU_ENGINE": "1"}


def stand_ins_start_method() -> str | None:
    """Of this engine's processes; None: it needs no stand-ins."""
    return os.environ.get(_STAND_INS)
