"""Copies of models' states on their way to the disk, and the thread that writes files aside."""

import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tinkercloud.core.types import StateCost
from tinkercloud.embedded.training import state_files
from tinkercloud.embedded.training.state_files import StateCopy
from tinkercloud.embedded.training.trainable_model import TrainableModel
from tinkercloud.errors import StateCopyLost


@dataclass(slots=True)
class _Validity:
    """Of a copy that shares the tensors of its model."""

    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class _Unwritten:
    model_id: str
    copy: StateCopy = field(repr=False)
    copy_s: float
    validity: _Validity = field(default_factory=_Validity)


class StateCopies:
    """Owned by the worker thread. One for each model: a newer one replaces it, so that copies which
    nobody writes do not pile up."""

    def __init__(self) -> None:
        self._unwritten: dict[int, _Unwritten] = {}
        self._shared: dict[str, _Validity] = {}  # by model

    def copy(self, model: TrainableModel, *, shares: bool = False) -> int:
        """Numbers are never used twice, not even by another engine process. shares: the model's own
        tensors, since there is no memory for others; the model's next operation ends this copy."""
        self.drop_of(model.id)
        began = time.monotonic()
        copy = StateCopy.sharing(model) if shares else StateCopy.of(model)
        number = secrets.randbits(62)
        unwritten = _Unwritten(model.id, copy, time.monotonic() - began)
        self._unwritten[number] = unwritten
        if shares:
            self._shared[model.id] = unwritten.validity
        return number

    def changes(self, model_id: str) -> None:
        """The model is about to."""
        shared = self._shared.pop(model_id, None)
        if shared is not None:
            shared.is_lost = True
            self.drop_of(model_id)

    def drop_of(self, model_id: str) -> None:
        """Its copy that is not being written; models without one are ignored."""
        self._unwritten = {n: u for n, u in self._unwritten.items() if u.model_id != model_id}

    def drop(self, number: int) -> None:
        """A copy that nobody will write; one that is gone is ignored."""
        self._unwritten.pop(number, None)

    def writing(self, number: int, directory: Path) -> Callable[[], StateCost]:
        """What writes the copy, for another thread to call. Raises StateCopyLost."""
        try:
            taken = self._unwritten.pop(number)
        except KeyError:
            raise StateCopyLost(number) from None

        def write() -> StateCost:
            began = time.monotonic()
            num_bytes = state_files.write(taken.copy, directory)
            if taken.validity.is_lost:
                raise StateCopyLost(number)
            return StateCost(num_bytes, taken.copy_s, time.monotonic() - began)

        return write


class FileWriter:
    """Runs what writes files, one after the other, in a thread of its own, so that samples and
    training go on. The thread begins with the first and ends with the process."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, task: Callable[[], None]) -> None:
        """task: raises nothing. What it holds is freed when it has run."""
        self._tasks.put(task)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="file-writer", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            self._tasks.get()()
