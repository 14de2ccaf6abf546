"""What the environment decides beside the settings: folders, the compiler, Ray, threads."""

import os
import shutil
from pathlib import Path

from tinkercloud.config.tree import ENV_PREFIX, Config

_INSTRUCTION_SET = ENV_PREFIX + "ENGINE_INSTRUCTION_SET"


def default_data_dir() -> Path:
    """Where data lives when only the environment has a say."""
    folder = os.environ.get(ENV_PREFIX + "DATA_DIR")
    return Path(folder).expanduser().absolute() if folder else Config().data_dir


def quiet_ray() -> None:
    """Before Ray is imported: it reports nothing to anyone, and leaves GPUs visible to whom it
    gives none (as it will by itself one day, and warns of until then)."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


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


def engine_environment() -> dict[str, str]:
    """The environment of the engine process.

    Its OpenMP threads wait for each other awake for a few microseconds and then sleep. The default
    is to stay awake, which makes every matrix product several times slower as soon as another
    process wants the same cores; without those microseconds, small operations take three times as
    long.
    """
    return {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000", **os.environ}
