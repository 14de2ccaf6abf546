"""Settings of a model's engines."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tinkercloud.cluster.rollout.generate import Served
from tinkercloud.planning.plan import SglangArguments


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """name: of the model, for logs and actors. command: starts SGLang's server, see
    `cluster.sglang.entry`. options: more of SGLang's, which come last and win. host None: each
    node's address in the cluster. key: without it the engines and their router answer nobody."""

    name: str
    model_path: Path
    arguments: SglangArguments
    eos_token_ids: tuple[int, ...]
    log_dir: Path
    command: tuple[str, ...]
    kv_tokens: int | None = None
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    host: str | None = None
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    router: bool = True
    start_timeout_s: float = 900.0
    request_timeout_s: float = 3600.0
    health_interval_s: float = 10.0
    health_timeout_s: float = 60.0
    health_failures: int = 3  # in a row, before an engine counts as dead
    restart_limit: int = 5  # of one engine within ten minutes

    @property
    def served(self) -> Served:
        return Served(self.arguments.context_length, self.eos_token_ids)
