"""One rank as a Ray actor: operations run in one thread, questions about progress in others.

Errors are returned as values. Ray would pickle them, and our error classes, whose constructors take
other arguments than their text, cannot be unpickled.
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
from tinkercloud.cluster.gpus.rendezvous import Rendezvous
from tinkercloud.cluster.training.rank_types import BatchColumns, RankSettings

logger = logging.getLogger(__name__)

WATCH = "watch"
_PIECE_BYTES = 64 * 1024  # Ray itself puts arguments of more than 100 KiB into the object store
CONCURRENCY = {WATCH: 4}  # threads by concurrency group, besides the one for operations


@dataclass(frozen=True, slots=True)
class Answer:
    """value, or error: its class in `errors` ("" for any other), its text, its traceback. ms: the
    time that the rank itself took."""

    value: Any = None
    error: tuple[str, str, str] | None = None
    ms: float = 0.0


class TrainActor:
    """All operations of the rank run in one thread, in the order of the calls: a rank may set up
    state of its thread (CUDA's device, torch's function modes). `progress` and `lifetime` are
    called in the concurrency group WATCH.

    No method is a coroutine: Ray would then run all methods in an event loop and hand each over to
    the thread and back, which takes 1 ms of the 4 ms of a call to two ranks.
    """

    def __init__(self) -> None:
        self._rank: Any = None
        self._rendezvous: Rendezvous | None = None
        self._num_done = 0

    def rendezvous(self) -> str:
        """On rank 0, before `start`: the init_method of torch.distributed for all ranks."""
        import ray.util

        self._rendezvous = Rendezvous(ray.util.get_node_ip_address())
        return self._rendezvous.init_method

    def start(self, rank_class: str, settings: RankSettings) -> bytes:
        """rank_class: "module:Class"; it is constructed with the settings."""

        def make() -> None:
            if self._rendezvous is not None:
                self._rendezvous.open()
            module, _, name = rank_class.partition(":")
            self._rank = getattr(import_module(module), name)(settings)

        return self._run(make)

    def call(self, batch: BatchColumns | None, *request: bytes) -> bytes:
        """request: of `packed_call`. batch: the last argument, where it is in the object store."""

        def work() -> Any:
            method, args, kwargs = pickle.loads(b"".join(request))
            last = () if batch is None else (batch.batch(),)
            return getattr(self._rank, method)(*args, *last, **kwargs)

        return self._run(work)

    def progress(self) -> int:
        """Grows with every finished call; a rank may add steps that it counts itself."""
        return self._num_done + getattr(self._rank, "progress", 0)

    def lifetime(self) -> None:
        """Never returns: its caller gets an error at once when this actor dies."""
        threading.Event().wait()

    def _run(self, work: Callable[[], Any]) -> bytes:
        """An Answer, pickled."""
        begun = time.perf_counter()
        try:
            value = work()
            answer = Answer(value, ms=1000 * (time.perf_counter() - begun))
        except Exception as error:  # noqa: BLE001 - the caller raises it
            answer = Answer(error=_encoded(error))
        finally:
            self._num_done += 1
        return pickle.dumps(answer, protocol=5)


def packed_call(method: str, *args: Any, **kwargs: Any) -> list[bytes]:
    """Pickled once for all ranks, and in-band: Ray makes a buffer of each small array, which takes
    longer than copying it. In pieces that are small enough for Ray to send them with the call."""
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
