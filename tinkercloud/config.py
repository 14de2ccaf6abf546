"""The one reader of environment, file and flags. A frozen tree, checked at birth.

Precedence: flag, then `TINKERCLOUD_*` variable, then the YAML file, then the default.
A setting has one name with dots (`engine.threads`); its flag is `--engine-threads`, its variable
`TINKERCLOUD_ENGINE_THREADS`, its place in the file `engine: {threads: ...}`. `models` is `--model`
(repeatable) and `TINKERCLOUD_MODEL` (NAME=PATH, separated by commas or lines).
"""

import dataclasses
import difflib
import logging
import os
import re
import shutil
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tinkercloud.errors import ConfigError

logger = logging.getLogger(__name__)

DEFAULT_MODEL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
ENV_PREFIX = "TINKERCLOUD_"
DRAFTERS = ("auto", "off", "suffix", "head")


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
    decode_depth: float = 1.2  # x max_batch: no prompts are begun beyond it
    kv_cache_bytes: int = 2 * 1024**3
    version_cache_bytes: int = 1024**3  # published versions kept in memory, the rest on disk
    microbatch_tokens: int = 1024  # tokens per training micro-batch
    activation_bytes: int = 2 * 1024**3  # what training keeps for a backward pass
    draft_share: float = 0.1  # of the time of training steps, for training of drafts; 0: none
    draft_memory_bytes: int = 256 * 1024**2  # what drafts learn from
    restart_limit: int = 5  # engine restarts within ten minutes before giving up

    def __post_init__(self) -> None:
        for name in (
            "threads",
            "max_batch",
            "kv_cache_bytes",
            "version_cache_bytes",
            "microbatch_tokens",
            "activation_bytes",
            "draft_memory_bytes",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"engine.{name} must be at least 1, not {value}")
        if not self.decode_depth >= 1:  # NaN too
            raise ConfigError(f"engine.decode_depth must be at least 1, not {self.decode_depth}")
        if not 0 <= self.draft_share <= 1:
            raise ConfigError(f"engine.draft_share must be from 0 to 1, not {self.draft_share}")
        if self.restart_limit < 0:
            raise ConfigError(f"engine.restart_limit must not be negative: {self.restart_limit}")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The cluster backend. What is None is left to the planner, or to Ray.

    gpus: of one full-parameter model, or of all adapters of one base together. prepare: names a
    function "module:function" that every training process calls first (see cluster.megatron_model).
    """

    ray_address: str | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    gpu_memory_bytes: int = 80 * 1024**3
    rollout_gpus: int = 0  # of `gpus`, for sampling alone; 0: training and sampling take turns
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp: int | None = None
    rollout_tp: int | None = None
    lora_rank: int = 32
    max_seq_len: int | None = None
    microbatch_tokens: int | None = None
    strategy: Literal["PACK", "SPREAD"] = "PACK"
    trainer: Literal["megatron", "miles"] = "megatron"
    device: Literal["cuda", "cpu"] = "cuda"
    prepare: str | None = None
    sglang_command: str | None = None
    sglang_args: str | None = None
    placement_timeout_s: float = 3600.0
    start_timeout_s: float = 1800.0
    operation_timeout_s: float = 1800.0
    sample_timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value, lowest = getattr(self, item.name), 0 if item.name == "rollout_gpus" else 1
            if isinstance(value, int) and value < lowest:
                raise ConfigError(f"cluster.{item.name} must be at least {lowest}, not {value}")
            if isinstance(value, float) and not value > 0:
                raise ConfigError(f"cluster.{item.name} must be above 0, not {value}")
        if self.prepare is not None and ":" not in self.prepare:
            raise ConfigError(f"cluster.prepare is {self.prepare!r}, not module:function")


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
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    hold_s: float = 30.0  # how long retrieve_future waits before it answers 408
    gap_grace_s: float = 10.0  # how long an early forward_backward waits for missing seq_ids
    max_body_bytes: int = 1024**3
    result_ttl_s: float = 24 * 3600.0  # how long a finished result is kept
    speculate: str = "auto"  # what drafts for samples: auto, off, suffix, head, model:PATH
    speculate_trace: Path | None = None  # each round of it, as lines of JSON
    engine: EngineConfig = field(default_factory=EngineConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, not {self.port}")
        for name in ("hold_s", "max_body_bytes", "result_ttl_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.gap_grace_s < 0:
            raise ConfigError(f"gap_grace_s must not be negative: {self.gap_grace_s}")
        kind, _, path = self.speculate.partition(":")
        if self.speculate not in DRAFTERS and not (kind in ("head", "model") and path):
            raise ConfigError(
                f"speculate is {self.speculate!r}, not one of {', '.join(DRAFTERS)}, model:PATH"
            )
        if not self.auth and self.host not in LOOPBACK_HOSTS:
            raise ConfigError(
                f"refusing to bind {self.host} without authentication; "
                "drop --no-auth or bind 127.0.0.1"
            )


def default_data_dir() -> Path:
    """Where data lives when only the environment has a say."""
    given = os.environ.get(ENV_PREFIX + "DATA_DIR")
    return Path(given).expanduser().absolute() if given else Config().data_dir


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
    given = os.environ.get("XDG_CACHE_HOME")
    return Path(given) / "tinkercloud" if given else Path.home() / ".cache" / "tinkercloud"


def c_compiler() -> str | None:
    """What CC names, or the system's; None where there is none."""
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")


def engine_environment() -> dict[str, str]:
    """The environment of the engine process.

    Its OpenMP threads wait for each other awake for a few microseconds and then sleep. The default
    is to stay awake, which makes every matrix product several times slower as soon as another
    process wants the same cores; without those microseconds, small operations take three times as
    long.
    """
    return {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000", **os.environ}


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of the tree. kind: its type annotation."""

    name: str  # "engine.threads"
    kind: Any
    default: Any

    @property
    def flag(self) -> str:
        return "--model" if self.name == "models" else "--" + re.sub(r"[._]", "-", self.name)

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag, and the shorter one by which it is asked for everywhere else."""
        return (self.flag, *(("--ray-address",) if self.name == "cluster.ray_address" else ()))

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.flag.removeprefix("--").replace("-", "_").upper()


def settings() -> dict[str, Setting]:
    """Every setting by name, read off the dataclasses."""
    return {setting.name: setting for setting in _leaves(Config, "")}


def load_config(
    flags: Mapping[str, Any], environ: Mapping[str, str], yaml_path: Path | None = None
) -> Config:
    """The tree from its sources. flags: setting name -> value, None where it was not given.

    yaml_path None: `TINKERCLOUD_CONFIG`, else `config.yaml` in the data directory if there is one.
    ConfigError names the source and the setting.
    """
    known = settings()
    layers = [_from_flags(flags, known), _from_environment(environ, known)]
    layers.append(_from_yaml(_yaml_file(yaml_path, environ, layers), known))
    values: dict[str, Any] = {}
    for layer in reversed(layers):
        values |= layer
    return _build(Config, values, "")


def parse_model(text: str) -> ModelSource:
    """NAME=PATH; the name may hold slashes, the path may start with ~."""
    name, equals, path = text.strip().partition("=")
    if not (equals and name.strip() and path.strip()):
        raise ValueError(f"{text.strip()!r} is not NAME=PATH")
    return ModelSource(name.strip(), Path(path.strip()).expanduser().absolute())


def _leaves(tree: type, prefix: str) -> Iterator[Setting]:
    hints = typing.get_type_hints(tree)
    for item in dataclasses.fields(tree):
        kind = hints[item.name]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            yield from _leaves(kind, f"{prefix}{item.name}.")
        else:
            yield Setting(prefix + item.name, kind, _default(item))


def _default(item: "dataclasses.Field[Any]") -> Any:
    made = item.default_factory
    return item.default if made is dataclasses.MISSING else made()


def _build(tree: type, values: Mapping[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(tree)
    given: dict[str, Any] = {}
    for item in dataclasses.fields(tree):
        name = prefix + item.name
        if dataclasses.is_dataclass(hints[item.name]):
            given[item.name] = _build(hints[item.name], values, f"{name}.")
        elif name in values:
            given[item.name] = values[name]
    return tree(**given)


def _from_flags(flags: Mapping[str, Any], known: Mapping[str, Setting]) -> dict[str, Any]:
    given = {name: value for name, value in flags.items() if value is not None}
    return {name: _read(known[name], value, known[name].flag) for name, value in given.items()}


def _from_environment(environ: Mapping[str, str], known: Mapping[str, Setting]) -> dict[str, Any]:
    by_variable = {setting.variable: setting for setting in known.values()}
    values: dict[str, Any] = {}
    for variable in sorted(v for v in environ if v.startswith(ENV_PREFIX)):
        if variable in by_variable:
            setting = by_variable[variable]
            values[setting.name] = _read(setting, environ[variable], variable)
        elif variable != ENV_PREFIX + "CONFIG":
            logger.warning("%s is not a setting%s", variable, _nearest(variable, by_variable))
    return values


def _yaml_file(
    path: Path | None, environ: Mapping[str, str], layers: list[dict[str, Any]]
) -> Path | None:
    named = path or environ.get(ENV_PREFIX + "CONFIG")
    if named:
        return Path(named).expanduser()
    data_dir = next((v["data_dir"] for v in layers if "data_dir" in v), Config().data_dir)
    usual = data_dir / "config.yaml"
    return usual if usual.is_file() else None


def _from_yaml(path: Path | None, known: Mapping[str, Setting]) -> dict[str, Any]:
    if path is None:
        return {}
    # Here, so that what needs no file needs no YAML package.
    import yaml

    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected settings as a mapping, found {type(tree).__name__}")
    values: dict[str, Any] = {}
    for name, value in _flatten(tree or {}, known):
        if name not in known:
            raise ConfigError(f"{path}: unknown setting {name!r}{_nearest(name, known)}")
        values[name] = _read(known[name], value, f"{path}: {name}")
    return values


def _flatten(
    tree: Mapping[Any, Any], known: Mapping[str, Setting], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        is_branch = any(other.startswith(f"{name}.") for other in known)
        if is_branch and (isinstance(value, dict) or value is None):
            yield from _flatten(value or {}, known, f"{name}.")
        else:
            yield name, value


def _nearest(name: str, names: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _read(setting: Setting, value: Any, source: str) -> Any:
    try:
        return _convert(setting.kind, value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{source}: {error}") from error


def _convert(kind: Any, value: Any) -> Any:
    if typing.get_origin(kind) is Literal:
        return _choice(typing.get_args(kind), value)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        # Optional only; `auto` is how a flag or a variable says None.
        inner = next(arg for arg in typing.get_args(kind) if arg is not type(None))
        return None if value in (None, "auto") else _convert(inner, value)
    return _CONVERTERS[kind](value)


def _choice(allowed: tuple[Any, ...], value: Any) -> Any:
    if value not in allowed:
        raise ValueError(f"{value!r} is not one of {', '.join(map(repr, allowed))}")
    return value


_SIZE = re.compile(r"(?i)\s*(\d+)\s*([kmgt]i?b?|b)?\s*")


def _integer(value: Any) -> int:
    """A whole number; `2GiB` and `512M` count in powers of 1024."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is not a whole number")
    unit = (match[2] or "b")[0].lower()
    return int(match[1]) * 1024 ** "bkmgt".index(unit)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a number")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is not a number") from None


_TRUTH = {"1": True, "true": True, "yes": True, "on": True}
_TRUTH |= {"0": False, "false": False, "no": False, "off": False}


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() not in _TRUTH:
        raise ValueError(f"{value!r} is not true or false")
    return _TRUTH[str(value).lower()]


def _text(value: Any) -> str:
    if value is False:
        return "off"  # as YAML reads the bare word
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not a text")
    return value


def _path(value: Any) -> Path:
    return value if isinstance(value, Path) else Path(_text(value)).expanduser().absolute()


def _models(value: Any) -> tuple[ModelSource, ...]:
    """A mapping (file), a list (flags, file) or separated text (environment)."""
    if isinstance(value, dict):
        value = [f"{name}={path}" for name, path in value.items()]
    elif isinstance(value, str):
        value = [part for part in re.split(r"[,\n]", value) if part.strip()]
    elif not isinstance(value, list):
        raise ValueError(f"{value!r} is not a mapping of names to paths")
    models = tuple(parse_model(_text(part)) for part in value)
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is given twice")
    return models


_CONVERTERS: dict[Any, Callable[[Any], Any]] = {
    bool: _truth,
    float: _number,
    int: _integer,
    str: _text,
    Path: _path,
    tuple[ModelSource, ...]: _models,
}
