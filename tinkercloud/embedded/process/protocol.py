"""How the API process and the engine process talk: length-prefixed pickles over a socket pair.

Both ends are this project's own code on one machine; nothing that a client sent is unpickled
(requests arrive here as `core.types` values). No torch: the API process imports this.
"""

import logging
import pickle
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from tinkercloud.config import DraftConfig, EngineConfig, ModelSource
from tinkercloud.core.types import (
    AdamParams,
    LoraSpec,
    SampleOutput,
    SampleRequest,
    ServedModel,
    StateCost,
    TokenChunk,
    TrainBatch,
    TrainOutput,
    WeightsSource,
)
from tinkercloud.errors import TinkercloudError, error_of
from tinkercloud.logs import LogFormat

logger = logging.getLogger(__name__)

R = TypeVar("R")

HEADER = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The first message to the engine: its part of the server's settings. models: the default
    first."""

    models: tuple[ModelSource, ...]
    dtype: str
    cache_dir: Path
    drafts_dir: Path
    speculate: str
    speculate_trace: Path | None
    engine: EngineConfig
    draft: DraftConfig
    log_format: LogFormat = "text"


@dataclass(frozen=True, slots=True)
class Serves:
    """The engine's first message, before it loads weights: what it serves, and which bits it
    computes (`backends.base.Backend.numerics`)."""

    served: tuple[ServedModel, ...]
    numerics: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The default model is loaded: calls are served from now on."""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """Instead of Serves, or of Ready: a model cannot be served."""

    reason: str


class Request(Generic[R]):
    """One operation of the engine process; `R` is the type of its result. Its contract is that of
    the method of `backends.base.Backend` with the same name; `request_handlers` has its handler.
    """

    __slots__ = ()

    @classmethod
    def answered_by(cls, handler: Callable[[Self], R]) -> "TableRow":
        """The table row of a handler that returns the result."""
        return cls, lambda request, reply: reply(handler(request))

    @classmethod
    def queued_by(cls, handler: Callable[[Self, "Reply[R]"], None]) -> "TableRow":
        """The table row of a handler whose result comes later, through `reply`."""
        return cls, handler


@dataclass(frozen=True, slots=True)
class CreateModel(Request[None]):
    model_id: str
    base_model: str
    lora: LoraSpec


@dataclass(frozen=True, slots=True)
class LoadModel(Request[LoraSpec]):
    model_id: str
    base_model: str
    directory: Path
    with_optimizer: bool


@dataclass(frozen=True, slots=True)
class DeleteModel(Request[None]):
    model_id: str


@dataclass(frozen=True, slots=True)
class ForwardBackward(Request[TrainOutput]):
    model_id: str
    batch: TrainBatch


@dataclass(frozen=True, slots=True)
class OptimStep(Request[dict[str, float]]):
    model_id: str
    params: AdamParams


@dataclass(frozen=True, slots=True)
class SaveModel(Request[None]):
    model_id: str
    directory: Path
    with_optimizer: bool


@dataclass(frozen=True, slots=True)
class CopyState(Request[int]):
    model_id: str


@dataclass(frozen=True, slots=True)
class WriteState(Request[StateCost]):
    copy: int
    directory: Path


@dataclass(frozen=True, slots=True)
class DropCopy(Request[None]):
    copy: int


@dataclass(frozen=True, slots=True)
class RestoreState(Request[None]):
    model_id: str
    base_model: str
    directory: Path


@dataclass(frozen=True, slots=True)
class Publish(Request[str]):
    source: WeightsSource


@dataclass(frozen=True, slots=True)
class Release(Request[None]):
    version_id: str


@dataclass(frozen=True, slots=True)
class WriteVersion(Request[None]):
    version_id: str
    directory: Path


@dataclass(frozen=True, slots=True)
class Sample(Request[SampleOutput]):
    """streams: `Tokens` come before the result."""

    version_id: str
    sample: SampleRequest
    streams: bool = False


@dataclass(frozen=True, slots=True)
class Cancel(Request[None]):
    """End an unfinished `Sample` call, whose result is then an error; others are ignored."""

    call_id: int


@dataclass(frozen=True, slots=True)
class TrainDraft(Request[None]):
    base_model: str


@dataclass(frozen=True, slots=True)
class Ping(Request[None]):
    """Answered between two steps, by the thread that computes."""


@dataclass(frozen=True, slots=True)
class Call:
    id: int
    request: Request[Any]


@dataclass(frozen=True, slots=True)
class Result:
    """Answer to a call: a value, or an error as (class name in `errors`, text)."""

    id: int
    value: Any = None
    error: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """What an engine step drew for the calls that stream: (call id, chunk), in order."""

    chunks: tuple[tuple[int, TokenChunk], ...]


@dataclass(frozen=True, slots=True)
class Reply(Generic[R]):
    """Where the outcome of one call goes. Call it exactly once."""

    call_id: int
    send: Callable[[object], None]

    def __call__(self, outcome: R | BaseException) -> None:
        if not isinstance(outcome, BaseException):
            self.send(Result(self.call_id, outcome))
            return
        name, text = encode_error(outcome)
        if name == "TinkercloudError":
            logger.error("call %s failed", self.call_id, exc_info=outcome)
        self.send(Result(self.call_id, error=(name, text)))


Handler = Callable[[Any, Reply[Any]], None]
TableRow = tuple[type[Request[Any]], Handler]


@dataclass(frozen=True, slots=True)
class Stats:
    """Sent about once a second while the engine works. speculation: by base model; metrics: more of
    it, as lines in Prometheus' text format."""

    values: dict[str, float | int | str] = field(default_factory=dict)
    speculation: dict[str, Any] = field(default_factory=dict)
    metrics: list[str] = field(default_factory=list)


def pack(message: object) -> bytes:
    body = pickle.dumps(message, protocol=5)
    return HEADER.pack(len(body)) + body


def receive(sock: socket.socket) -> object | None:
    """The next message, blocking; None when the other end is gone."""
    header = _exactly(sock, HEADER.size)
    if header is None:
        return None
    body = _exactly(sock, HEADER.unpack(header)[0])
    return None if body is None else pickle.loads(body)


def _exactly(sock: socket.socket, num_bytes: int) -> bytes | None:
    buffer = bytearray(num_bytes)
    view, filled = memoryview(buffer), 0
    while filled < num_bytes:
        got = sock.recv_into(view[filled:])
        if got == 0:
            return None
        filled += got
    return bytes(buffer)


def encode_error(error: BaseException) -> tuple[str, str]:
    """Errors of our tree keep their class; anything else becomes a TinkercloudError."""
    if isinstance(error, TinkercloudError):
        return type(error).__name__, str(error)
    return "TinkercloudError", f"{type(error).__name__}: {error}"


def decode_error(error: tuple[str, str]) -> TinkercloudError:
    return error_of(*error)
