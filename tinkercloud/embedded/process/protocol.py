"""How the API process and the engine process talk: length-prefixed pickles over a socket pair.

Both ends are this project's own code on one machine; nothing that a client sent is unpickled
(requests arrive here as `core.types` values). No torch: the API process imports this.
"""

import pickle
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkercloud import errors
from tinkercloud.core.types import ServedModel

HEADER = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The first message to the engine. models: (name, path) pairs, the default first."""

    models: tuple[tuple[str, Path], ...]
    dtype: str
    cache_dir: Path
    threads: int | None
    max_batch: int
    decode_depth: float
    kv_cache_bytes: int
    version_cache_bytes: int
    microbatch_tokens: int
    activation_bytes: int
    speculate: str
    speculate_trace: Path | None
    drafts_dir: Path
    draft_share: float
    draft_memory_bytes: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine's first message: what it serves."""

    served: tuple[ServedModel, ...]


@dataclass(frozen=True, slots=True)
class StartFailed:
    """Instead of Ready: a model cannot be served."""

    reason: str


@dataclass(frozen=True, slots=True)
class Call:
    id: int
    method: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """Answer to a call: a value, or an error as (class name in `errors`, text)."""

    id: int
    value: Any = None
    error: tuple[str, str] | None = None


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
    if isinstance(error, errors.TinkercloudError):
        return type(error).__name__, str(error)
    return "TinkercloudError", f"{type(error).__name__}: {error}"


def decode_error(error: tuple[str, str]) -> errors.TinkercloudError:
    name, text = error
    kind = getattr(errors, name, errors.TinkercloudError)
    # The classes build their text from what was wrong; here the text is already built.
    rebuilt = kind.__new__(kind)
    Exception.__init__(rebuilt, text)
    return rebuilt
