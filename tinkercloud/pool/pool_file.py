"""The YAML of a pool: which machines it has, and which models it may serve."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StringConstraints,
    ValidationError,
    model_validator,
)

from tinkercloud.addresses import is_loopback
from tinkercloud.errors import ConfigError
from tinkercloud.pool.sizes import parse_size

# Names become names of files and command-line arguments: no leading dash, no separators.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Host = Annotated[
    str, StringConstraints(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9:][A-Za-z0-9.:-]*$")
]
DeviceName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z]*[0-9]{0,3}$")]
SUFFIX = "suffix"
Port = Annotated[int, Field(ge=1, le=65535)]


def _size(value: object) -> int:
    try:
        return parse_size(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


Size = Annotated[
    int, BeforeValidator(_size), Field(ge=0), PlainSerializer(lambda num_bytes: num_bytes)
]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Gpu(_Part):
    """device: as `llama-server --list-devices` names it (CUDA0, ROCm1, Vulkan0, Metal, CPU).
    memory: of it for the pool; None: what is free when the pool starts."""

    device: DeviceName
    memory: Size | None = None


class Worker(_Part):
    """A machine that lends memory. The worker's own port is `port`; each of its devices has an
    RPC server on one of the ports that follow.

    start "local": a process on the coordinator's machine; "ssh": `tinkercloud pool worker` is
    started there through ssh, behind a tunnel, by the program `command`; "by_hand": somebody has
    started it.
    """

    name: Name
    host: Host = "127.0.0.1"
    port: Port = 50050
    start: Literal["local", "ssh", "by_hand"] = "ssh"
    gpus: tuple[Gpu, ...] = (Gpu(device="CPU"),)
    unencrypted_network: bool = False
    key_file: Path | None = None
    command: str = Field(default="tinkercloud", pattern=r"^[^-]")
    rpc_server: str | None = Field(default=None, pattern=r"^[^-]")
    cache: bool = False
    threads: Annotated[int, Field(ge=1)] | None = None

    @property
    def num_ports(self) -> int:
        return 1 + len(self.gpus)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.gpus:
            raise ValueError("gpus is empty; leave it out for the CPU, or name devices")
        devices = [gpu.device for gpu in self.gpus]
        if len(set(devices)) < len(devices):
            raise ValueError(f"gpus names a device twice: {', '.join(devices)}")
        if self.port + len(self.gpus) > 65535:
            raise ValueError(f"port {self.port} leaves no room for {len(self.gpus)} RPC servers")
        if self.start == "local" and not is_loopback(self.host):
            raise ValueError(f"start: local is for this machine, and host is {self.host}")
        if self.start == "by_hand" and not is_loopback(self.host) and not self.unencrypted_network:
            raise ValueError(
                f"llama.cpp's RPC has no authentication and no encryption: whoever reaches "
                f"{self.host} can use the worker and read what it computes. Use start: ssh, or a "
                "tunnel with host: 127.0.0.1, or say unencrypted_network: true"
            )
        return self


class Coordinator(_Part):
    """The machine where llama-server runs. memory: of its RAM for layers; 0: none. key_file: holds
    the keys that clients have to send, one on each line."""

    host: Host = "127.0.0.1"
    port: Port = 8740
    memory: Size = 0
    gpus: tuple[Gpu, ...] = ()
    reserve: Size = 64 * 2**20
    key_file: Path | None = None
    llama_server: str | None = Field(default=None, pattern=r"^[^-]")
    threads: Annotated[int, Field(ge=1)] | None = None

    @property
    def url(self) -> str:
        """Of llama-server, as this machine reaches it."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{host}:{self.port}"

    def key(self) -> str | None:
        """The first that llama-server takes; None: it asks for none. Raises ConfigError."""
        if self.key_file is None:
            return None
        try:
            return self.key_file.read_text(encoding="ascii").split()[0]
        except (OSError, UnicodeDecodeError, IndexError):
            raise ConfigError(f"{self.key_file} holds no key: one on each line is wanted") from None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not is_loopback(self.host) and self.key_file is None:
            raise ValueError(
                f"host {self.host} is open to others without a key: write one into a file and name "
                "it as key_file, or listen on 127.0.0.1"
            )
        return self


class Model(_Part):
    """context: tokens that the cache of keys and values holds, of all requests together.
    tensor_split: layers of each device in the order of `tinkercloud pool plan`, in proportion.
    output "coordinator": the matrix of logits stays there, so that no logits cross the network.
    draft: the GGUF file of a smaller model that drafts, or SUFFIX: a sample's own text does."""

    name: Name
    path: Path
    context: Annotated[int, Field(ge=256)] = 4096
    parallel: Annotated[int, Field(ge=1, le=64)] = 4
    ubatch: Annotated[int, Field(ge=32, le=4096)] = 512
    cache_type: Literal["f16", "q8_0", "q4_0"] = "f16"
    tensor_split: tuple[Annotated[float, Field(ge=0)], ...] | None = None
    output: Literal["coordinator"] | None = None
    draft: Literal["suffix"] | Path | None = None
    drafted_tokens: Annotated[int, Field(ge=1, le=64)] = 8

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tensor_split is not None and sum(self.tensor_split) <= 0:
            raise ValueError("tensor_split adds up to nothing; give each device its share")
        return self


class PoolFile(_Part):
    coordinator: Coordinator = Field(default_factory=Coordinator)
    workers: tuple[Worker, ...] = ()
    models: tuple[Model, ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        for kind, names in (
            ("workers", [worker.name for worker in self.workers]),
            ("models", [model.name for model in self.models]),
        ):
            if len(set(names)) < len(names):
                raise ValueError(f"{kind} have the same name: {', '.join(names)}")
        if not self.models:
            raise ValueError("models is empty; name one by its name and the path of its GGUF file")
        self._check_ports()
        return self

    def _check_ports(self) -> None:
        taken = {("127.0.0.1", self.coordinator.port): "the coordinator"}
        for worker in self.workers:
            for port in range(worker.port, worker.port + worker.num_ports):
                host = "127.0.0.1" if is_loopback(worker.host) else worker.host
                if (other := taken.setdefault((host, port), worker.name)) != worker.name:
                    raise ValueError(f"port {port} of {host} is both {other}'s and {worker.name}'s")

    def model(self, name: str | None) -> Model:
        """None: the first one. Raises ConfigError."""
        if name is None:
            return self.models[0]
        for model in self.models:
            if model.name == name:
                return model
        names = ", ".join(model.name for model in self.models)
        raise ConfigError(f"the pool has no model {name!r}; it has: {names}")


def parse_pool(values: Any, folder: Path) -> PoolFile:
    """Of the YAML's values; relative paths start at `folder`. Raises ConfigError, a line for each
    fault."""
    try:
        pool = PoolFile.model_validate(values)
    except ValidationError as error:
        faults = [f"  {_place(fault['loc'])}: {_text(fault)}" for fault in error.errors()]
        raise ConfigError("\n".join(["the pool's file cannot be used:", *faults])) from None
    return pool.model_copy(
        update={
            "coordinator": _rooted(pool.coordinator, "key_file", folder),
            "workers": tuple(_rooted(worker, "key_file", folder) for worker in pool.workers),
            "models": tuple(
                _rooted(_rooted(model, "path", folder), "draft", folder) for model in pool.models
            ),
        }
    )


def load_pool(path: Path) -> PoolFile:
    """Raises ConfigError."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; `tinkercloud pool init` writes one"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} has no models; `tinkercloud pool init` writes a whole one")
    return parse_pool(values, path.absolute().parent)


def pool_text(pool: PoolFile) -> str:
    """YAML that `load_pool` reads to the same pool; what is as by default is left out."""
    return yaml.safe_dump(
        pool.model_dump(mode="json", exclude_defaults=True), sort_keys=False, allow_unicode=True
    )


def write_tensor_split(path: Path, name: str, split: tuple[float, ...] | None) -> None:
    """Into the file's model of that name; None: out of it. What else the file says stays, but for
    comments."""
    values: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    for model in values["models"]:
        if model["name"] == name:
            model.pop("tensor_split", None)
            if split is not None:
                model["tensor_split"] = list(split)
    path.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _rooted(part: Any, name: str, folder: Path) -> Any:
    path = getattr(part, name)
    if not isinstance(path, Path):
        return part
    return part.model_copy(update={name: folder / path.expanduser()})


def _place(location: tuple[int | str, ...]) -> str:
    return ".".join(str(each) for each in location) or "file"


def _text(fault: Any) -> str:
    if fault["type"] == "extra_forbidden":
        return "there is no such setting"
    return fault["msg"].removeprefix("Value error, ")
