"""One rank as a Ray actor: its work runs in one thread, and questions about it in others.

Errors come back as values. Ray would pickle them, which the classes of our tree, that build their
text themselves, do not survive.
"""

import logging
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from tinkercloud import errors
from tinkercloud.cluster.gpus.rendezvous import Meeting
from tinkercloud.cluster.training.rank_types import BatchColumns, RankSettings

logger = logging.getLogger(__name__)

WATCH = "watch"
_PIECE_BYTES = 64 * 1024  # Ray puts arguments beyond 100 KiB into the object store itself
CONCURRENCY = {WATCH: 4}  # threads by group, besides the rank's own


@dataclass(frozen=True, slots=True)
class Answer:
    """value, or an error: its class in `errors` ("" for any other), its text, its traceback.
    ms: what the rank itself took."""

    value: Any = None
    error: tuple[str, str, str] | None = None
    ms: float = 0.0


class TrainActor:
    """Everything of the rank happens in one thread, in the order of the calls: what a rank sets up
    for its thread stays set up. `progress` and `lifetime` are called in the group WATCH.

    No method is a coroutine: then Ray would run all in an event loop, whose way to the thread and
    back takes longer than the rest of a call (1 ms of 4 for two ranks on one small machine).
    """

    def __init__(self) -> None:
        self._rank: Any = None
        self._meeting: Meeting | None = None
        self._num_done = 0

    def meet(self) -> str:
        """Of rank 0, before `start`: where the ranks meet; torch.distributed's init_method."""
        import ray.util

        self._meeting = Meeting(ray.util.get_node_ip_address())
        return self._meeting.init_method

    def start(self, rank_class: str, settings: RankSettings) -> bytes:
        """rank_class: "module:Class", made with the settings."""

        def make() -> None:
            if self._meeting is not None:
                self._meeting.open()
            module, _, name = rank_class.partition(":")
            self._rank = getattr(import_module(module), name)(settings)

        return self._run(make)

    def call(self, batch: BatchColumns | None, *request: bytes) -> bytes:
        """request: `packed_call`'s. batch: its last argument, where it came by the object store."""

        def work() -> Any:
            method, args, kwargs = pickle.loads(b"".join(request))
            more = () if batch is None else (batch.batch(),)
            return getattr(self._rank, method)(*args, *more, **kwargs)

        return self._run(work)

    def progress(self) -> int:
        """Grows while the rank gets somewhere; a rank may count steps of its own."""
        return self._num_done + getattr(self._rank, "progress", 0)

    def lifetime(self) -> None:
        """Never returns: its caller learns of this actor's death at once."""
        threading.Event().wait()

    def _run(self, work: Callable[[], Any]) -> bytes:
        """An Answer, pickled."""
        begun = time.perf_counter()
        try:
            value = work()
            answer = Answer(value, ms=1000 * (time.perf_counter() - begun))
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller raises it
            answer = Answer(error=_encoded(error))
        finally:
            self._num_done += 1
        return pickle.dumps(answer, protocol=5)


def packed_call(method: str, *args: Any, **kwargs: Any) -> list[bytes]:
    """Pickled once for all ranks, and by pickle alone: Ray's own way takes each small array for
    a buffer of its own, which costs more than the copy. In pieces that Ray sends with the call."""
    packed = pickle.dumps((method, args, kwargs), protocol=5)
    return [packed[i : i + _PIECE_BYTES] for i in range(0, len(packed), _PIECE_BYTES)]


def answer_of(data: bytes) -> Answer:
    return pickle.loads(data)


def _encoded(error: Exception) -> tuple[str, str, str]:
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, errors.TinkercloudError):
        return type(error).__name__, str(error), trace
    return "", f"{type(error).__name__}: {error}", trace


def decoded(error: tuple[str, str, str]) -> errors.TinkercloudError:
    """An error of our tree as it was raised; EngineDied for any other."""
    name, text, _ = error
    kind = getattr(errors, name, errors.EngineDied)
    rebuilt = kind.__new__(kind)
    Exception.__init__(rebuilt, text)
    return rebuilt
