"""The one reader of environment, file and flags. A frozen tree, checked at birth.

Precedence: flag, then `TINKERCLOUD_*` variable, then the YAML file, then the default.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tinkercloud.errors import ConfigError

DEFAULT_MODEL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A base model to serve: a Hugging Face folder or a GGUF file under the name clients use."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The embedded engine. threads None: the cores this process may use."""

    threads: int | None = None
    max_batch: int = 64  # sequences decoded together
    kv_cache_bytes: int = 2 * 1024**3
    microbatch_tokens: int = 1024  # tokens per training micro-batch
    restart_limit: int = 5  # engine restarts within ten minutes before giving up


@dataclass(frozen=True, slots=True)
class Config:
    """Everything `tinkercloud serve` can be told. models empty: the default model."""

    host: str = "127.0.0.1"
    port: int = 8700
    data_dir: Path = field(default_factory=lambda: Path.home() / ".tinkercloud")
    models: tuple[ModelSource, ...] = ()
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    backend: str = "embedded"
    auth: bool = True
    hold_s: float = 30.0  # how long retrieve_future waits before it answers 408
    gap_grace_s: float = 10.0  # how long an early forward_backward waits for missing seq_ids
    max_body_bytes: int = 1024**3
    result_ttl_s: float = 24 * 3600.0  # how long a finished result is kept
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if not self.auth and self.host not in LOOPBACK_HOSTS:
            raise ConfigError(
                f"refusing to bind {self.host} without authentication; "
                "drop --no-auth or bind 127.0.0.1"
            )
