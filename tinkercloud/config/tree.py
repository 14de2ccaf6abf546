"""The settings: a frozen tree, each leaf stated once with its default, its help and its bounds.

The command line's help, the tables of docs/operations.md and the checks are made of these lines
(`setting.py`).
"""

import dataclasses
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from tinkercloud.addresses import parse_addresses
from tinkercloud.errors import ConfigError

DEFAULT_MODEL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
DRAFTERS = ("auto", "off", "suffix", "head")
WITH_ARGUMENT = ("head", "model", "remote")
KIB, MIB, GIB = 1024, 1024**2, 1024**3
MAX_TOPK_LOGPROBS = 4 * 2**20
"""32 MiB on the wire."""
T = TypeVar("T")


def _setting(
    default: T,
    text: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
) -> T:
    """A field with its help and the bounds of its value. None as a value is never out of bounds."""
    bounds = {"at_least": at_least, "at_most": at_most, "above": above}
    metadata: dict[str, Any] = {"help": text, **bounds}
    # As a default value to type checkers: what `dataclass` makes of a field is its default.
    return typing.cast(T, field(default=default, metadata=metadata))


def _check_bounds(tree: Any, prefix: str = "") -> None:
    for item in dataclasses.fields(tree):
        value, bounds = getattr(tree, item.name), item.metadata
        if value is None:
            continue
        name = f"{prefix}{item.name}"
        low, high, above = (bounds.get(bound) for bound in ("at_least", "at_most", "above"))
        # Negated, so that NaN is refused.
        if low is not None and not value >= low:
            raise ConfigError(f"{name} must be at least {low:g}, not {value}")
        if high is not None and not value <= high:
            raise ConfigError(f"{name} must be at most {high:g}, not {value}")
        if above is not None and not value > above:
            raise ConfigError(f"{name} must be above {above:g}, not {value}")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A base model to serve: a Hugging Face folder or a GGUF file under the name clients use."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class ModelAlias:
    """A second name by which clients reach a served base model."""

    name: str
    served: str


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The embedded engine."""

    threads: int | None = _setting(
        None, "threads that compute; auto: the cores this process may use", at_least=1
    )
    instruction_set: Literal[
        "auto", "generic", "avx2", "avx512", "avx512_bf16", "amx", "amx_emulated"
    ] = _setting(
        "auto",
        "of the compiled kernels: generic, avx2, avx512, avx512_bf16, amx; auto: the fastest here",
    )
    max_batch: int = _setting(64, "sequences decoded together", at_least=1)
    decode_depth: float = _setting(
        1.2, "no prompts are begun beyond so many times max-batch samples", at_least=1
    )
    kv_cache_bytes: int = _setting(
        2 * GIB, "memory for keys and values of each base model", at_least=1
    )
    version_cache_bytes: int = _setting(
        GIB, "memory for published versions; the rest wait on disk", at_least=1
    )
    microbatch_tokens: int = _setting(1024, "tokens per training micro-batch", at_least=1)
    activation_bytes: int = _setting(2 * GIB, "memory for what a backward pass needs", at_least=1)
    memory_bytes: int | None = _setting(
        None,
        "memory that the engine may have in all; auto: what the machine, container or GPU has left",
        at_least=1,
    )
    draft_share: float = _setting(
        0.1,
        "of the time of training steps, for training of drafts; 0: none",
        at_least=0,
        at_most=1,
    )
    draft_memory_bytes: int = _setting(256 * MIB, "memory for what drafts learn from", at_least=1)

    def __post_init__(self) -> None:
        _check_bounds(self, "engine.")


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """How drafts are made, and how they are trained. `engine.draft_share` is the time for that."""

    tokens: int = _setting(
        8, "that a head or a draft model drafts at once, at most", at_least=1, at_most=64
    )
    in_quiet_time: bool = _setting(
        True, "train drafts, and read samples for them once more, while nobody asks for anything"
    )
    make_head: bool = _setting(
        False,
        "auto: make a draft head for each served model while nobody asks for anything, and draft "
        "with it where text that was seen before says nothing",
    )
    acceptance: float = _setting(
        0.8,
        "of drafted tokens, below which a draft learns from what was sampled without any training",
        at_least=0,
        at_most=1,
    )
    least_cases: int = _setting(
        512,
        "new ones before it does: sampled tokens, or disagreements of a draft model",
        at_least=1,
    )
    replay_share: float = _setting(
        0.2, "of a batch, from earlier versions or agreed cases", at_least=0, at_most=1
    )
    rank: int = _setting(8, "of the adapter that a draft model learns", at_least=1, at_most=1024)
    rate: float = _setting(5e-4, "at which drafts learn, at its peak", above=0)
    remote_wait_ms: float = _setting(
        50.0, "that a round waits for drafts of remote workers, at most", at_least=0
    )
    remote_key_file: Path | None = _setting(  # noqa: RUF009 - a field of its own each time
        None, "file with the key of remote workers; auto: they ask for none"
    )
    remote_ca_file: Path | None = _setting(  # noqa: RUF009 - a field of its own each time
        None, "certificates (PEM) that remote workers' are signed by; auto: no TLS"
    )
    remote_model: Path | None = _setting(  # noqa: RUF009 - a field of its own each time
        None,
        "draft model that remote workers have too: it learns here, and they get what it learned; "
        "auto: they draft with what they have",
    )

    def __post_init__(self) -> None:
        _check_bounds(self, "draft.")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The cluster backend. What is None is left to the planner, or to Ray."""

    ray_address: str | None = _setting(
        None, "Ray to use, host:port; auto: one of its own on this machine"
    )
    gpus: int | None = _setting(
        None,
        "GPUs of one full-parameter model, or of all adapters of one base; auto: all that Ray has",
        at_least=1,
    )
    gpus_per_node: int | None = _setting(
        None, "GPUs of one machine; auto: those of Ray's largest node", at_least=1
    )
    gpu_memory_bytes: int = _setting(80 * GIB, "memory of one GPU", at_least=1)
    rollout_gpus: int = _setting(
        0, "of these GPUs, how many only sample; 0: all train and sample alternately", at_least=0
    )
    tp: int | None = _setting(None, "tensor-parallel size", at_least=1)
    pp: int | None = _setting(None, "pipeline-parallel size", at_least=1)
    cp: int | None = _setting(None, "context-parallel size", at_least=1)
    ep: int | None = _setting(None, "expert-parallel size", at_least=1)
    dp: int | None = _setting(None, "data-parallel size", at_least=1)
    rollout_tp: int | None = _setting(None, "GPUs of one sampling engine", at_least=1)
    lora_rank: int = _setting(32, "largest rank of an adapter", at_least=1)
    max_seq_len: int | None = _setting(None, "longest sequence in tokens", at_least=1)
    microbatch_tokens: int | None = _setting(None, "tokens per training micro-batch", at_least=1)
    strategy: Literal["PACK", "SPREAD"] = _setting("PACK", "PACK: few nodes; SPREAD: many")
    trainer: Literal["megatron", "miles"] = _setting(
        "megatron", "megatron, or miles where that is installed"
    )
    device: Literal["cuda", "cpu"] = _setting(
        "cuda", "cuda, or cpu: stand-ins for GPUs, where there are none"
    )
    prepare: str | None = _setting(
        None, "module:function that training processes call first; auto: none"
    )
    sglang_command: str | None = _setting(
        None, "command that starts a sampling engine; auto: SGLang in the server's environment"
    )
    sglang_args: str | None = _setting(
        None, "more options for SGLang, as one text; they win over the plan's; auto: none"
    )
    placement_timeout_s: float = _setting(3600.0, "seconds that a model waits for GPUs", above=0)
    start_timeout_s: float = _setting(
        1800.0, "seconds that training processes or engines may take to start", above=0
    )
    operation_timeout_s: float = _setting(
        1800.0, "seconds without progress after which training counts as hung", above=0
    )
    sample_timeout_s: float = _setting(3600.0, "seconds that a sample may take", above=0)

    def __post_init__(self) -> None:
        _check_bounds(self, "cluster.")
        if self.prepare is not None and ":" not in self.prepare:
            raise ConfigError(f"cluster.prepare is {self.prepare!r}, not module:function")


@dataclass(frozen=True, slots=True)
class Config:
    """What `tinkercloud serve` takes. models empty: the default model."""

    host: str = _setting("127.0.0.1", "address to bind; others than loopback need authentication")
    port: int = _setting(8700, "port to bind; 0: any free one", at_least=0, at_most=65535)
    data_dir: Path = field(
        default_factory=lambda: Path.home() / ".tinkercloud",
        metadata={"help": "where models, keys, results and checkpoints live"},
    )
    models: tuple[ModelSource, ...] = _setting(
        (), "NAME=PATH of a Hugging Face folder or GGUF file; repeatable"
    )
    aliases: tuple[ModelAlias, ...] = _setting(
        (), "NAME=SERVED, a second name for a served model; repeatable"
    )
    pool: Path | None = _setting(  # noqa: RUF009 - a field of its own each time
        None, "file of a pool of machines, whose models are served for sampling alone; auto: none"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = _setting(
        "auto",
        "number type of the base weights: float32, bfloat16; auto: bfloat16 where it is native",
    )
    backend: str = _setting("embedded", "what computes: embedded, cluster, fake")
    auth: bool = _setting(True, "whether requests need a key")
    public_url: str | None = _setting(
        None, "where clients reach this server, for links to files; auto: as a request names it"
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "info", "debug, info, warning or error"
    )
    log_format: Literal["text", "json"] = _setting(
        "text", "text, or json: one object to a line, with the ids of what it is about"
    )
    otlp_endpoint: str | None = _setting(
        None, "URL of a collector of OpenTelemetry traces, http://HOST:4318; auto: none are sent"
    )
    metrics_users: str = _setting(
        "metrics",
        "users who see the whole server's numbers in /metrics and /health as administrators do, "
        "separated by commas; others see their own",
    )
    hold_s: float = _setting(
        30.0, "seconds that a poll is held before it answers that nothing is there yet", above=0
    )
    gap_grace_s: float = _setting(
        10.0, "seconds that an early forward_backward waits for its predecessors", at_least=0
    )
    drain_s: float = _setting(
        20.0,
        "seconds that operations and snapshots may take when the server stops",
        at_least=0,
    )
    max_body_bytes: int = _setting(GIB, "largest request body", above=0)
    body_memory_bytes: int | None = _setting(
        None,
        "memory for bodies in flight, decompressed, and large answers; half of it for one user; "
        "auto: twice max_body_bytes",
        above=0,
    )
    max_topk_logprobs: int = _setting(
        MAX_TOPK_LOGPROBS, "alternatives (positions times k) that a sample may ask for", at_least=1
    )
    head_timeout_s: float = _setting(
        10.0, "seconds that the head of a request may take to come", above=0
    )
    body_timeout_s: float = _setting(
        30.0, "seconds that a body may take, and one more for each 16 kB of it", above=0
    )
    max_connections: int = _setting(
        8192, "open connections; half-open and idle ones are closed for new ones", at_least=1
    )
    server_losses: bool = _setting(
        False, "whether losses of create_custom_loss run here; else each runs in its client"
    )
    result_ttl_s: float = _setting(24 * 3600.0, "seconds that a finished result is kept", above=0)
    result_bytes: int = _setting(
        4 * GIB, "of finished results; the oldest go first, after ten minutes", above=0
    )
    idle_model_s: float = _setting(
        300.0, "seconds unused after which models and published weights go to the disk", above=0
    )
    published_bytes: int = _setting(
        20 * GIB,
        "of weights published without a name, on disk; those that were sampled longest ago go",
        above=0,
    )
    session_ttl_s: float = _setting(
        900.0,
        "seconds without heartbeats after which a session is closed until the next one: its models "
        "and weights go to the disk",
        above=0,
    )
    record_ttl_s: float = _setting(
        24 * 3600.0, "seconds that a sample with record_stability_info is kept unused", above=0
    )
    record_bytes: int = _setting(
        GIB, "such samples of each user; those that were unused longest go first", above=0
    )
    session_days: float = _setting(
        30.0,
        "days without heartbeats or requests after which a session is finished and its models go",
        above=0,
    )
    archive_days: float = _setting(
        30.0, "days that a run's operations are kept for replays; 0: not", at_least=0
    )
    archive_bytes: int = _setting(
        10 * GIB, "of runs kept for replays, the oldest go first; 0: none are kept", at_least=0
    )
    capture_ttl_s: float = _setting(
        24 * 3600.0, "seconds that a capture session is kept after its last use", above=0
    )
    capture_bytes: int = _setting(GIB, "of the capture sessions of each user", above=0)
    capture_turns: int = _setting(20_000, "turns of one capture session", at_least=1)
    reward_hosts: str = _setting(
        "none", "HOST:PORT of webhooks that may be asked for rewards, separated by commas"
    )
    share_prefix_cache: bool = _setting(
        False,
        "whether users reuse the computed beginnings of each other's prompts; they can then tell "
        "what others asked",
    )
    speculate: str = _setting(
        "auto",
        "what drafts: auto, off, suffix, head, model:PATH, remote:HOST:PORT; it changes time only",
    )
    speculate_trace: Path | None = _setting(  # noqa: RUF009 - a field of its own each time
        None, "write each draft and its outcome to this file (JSON lines); auto: none"
    )
    engine: EngineConfig = field(default_factory=EngineConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        _check_bounds(self)
        kind, _, path = self.speculate.partition(":")
        if self.speculate not in DRAFTERS and not (kind in WITH_ARGUMENT and path):
            raise ConfigError(
                f"speculate is {self.speculate!r}, not one of {', '.join(DRAFTERS)}, model:PATH, "
                "remote:HOST:PORT"
            )
        if kind == "remote":
            parse_addresses(path)
        if not self.auth and self.host not in LOOPBACK_HOSTS:
            raise ConfigError(
                f"refusing to bind {self.host} without authentication; "
                "drop --no-auth or bind 127.0.0.1"
            )
