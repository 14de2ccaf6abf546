"""What is examined: a backend with its settings, and the Pythons that would run it."""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tinkercloud import fetch
from tinkercloud.config import Config, ModelSource


@dataclass(frozen=True, slots=True)
class Target:
    """sglang_python None: SGLang's command starts something that is no Python. needs_gpus False:
    ranks and engines run on CPUs. models: that would be served. cache_bytes: what the embedded
    engine may hold besides weights. instruction_set: of its compiled kernels. variables: NCCL's.
    timeout_s: how long one probe may take."""

    backend: str
    data_dir: Path
    host: str = "127.0.0.1"
    port: int = 0
    dtype: str = "auto"
    models: tuple[ModelSource, ...] = ()
    cache_bytes: int = 0
    instruction_set: str = "auto"
    ray_address: str = ""
    python: str = sys.executable
    sglang_python: str | None = sys.executable
    needs_gpus: bool = True
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    timeout_s: float = 120.0


def target_of(config: Config, variables: Mapping[str, str]) -> Target:
    cluster, engine = config.cluster, config.engine
    return Target(
        backend=config.backend,
        data_dir=config.data_dir,
        host=config.host,
        port=config.port,
        dtype=config.dtype,
        models=_models(config),
        cache_bytes=engine.kv_cache_bytes + engine.version_cache_bytes + engine.activation_bytes,
        instruction_set=engine.instruction_set,
        ray_address=cluster.ray_address or "",
        sglang_python=python_of(shlex.split(cluster.sglang_command or "")),
        needs_gpus=cluster.device == "cuda",
        variables=variables,
    )


def _models(config: Config) -> tuple[ModelSource, ...]:
    """Those named, else the default one of the embedded backend where it was fetched."""
    if config.models or config.backend != "embedded":
        return config.models
    model = fetch.packaged(fetch.DEFAULT_PACKAGED)
    path = fetch.locate(model, config.data_dir)
    return () if path is None else (ModelSource(model.serve_as, path),)


def python_of(command: Sequence[str]) -> str | None:
    """The Python that a command starts; this one for an empty command, None where it has none."""
    if not command:
        return sys.executable
    pythons = (word for word in command if re.fullmatch(r"python[\d.]*", Path(word).name))
    return next(pythons, None)
