"""A worker in a thread of its own, for tests that call it as the server does."""

import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch

from tinkercloud.embedded.process.protocol import Call, EngineSettings, Result, Stats
from tinkercloud.embedded.process.worker import Worker

LIMIT_S = 120.0


class Driver:
    """Calls to a worker that runs in a thread, and its answers in the order they came."""

    def __init__(
        self, folder: Path, scratch: Path, speculate: str = "off", draft_share: float = 0.1
    ):
        """Drafts are in `scratch`."""
        self._threads = torch.get_num_threads()
        settings = EngineSettings(
            *((("tiny", folder),), "float32", scratch, 1, 4, 1.2, 2**26, 2**26, 1024, 2**28),
            *(speculate, None, scratch, draft_share, 2**26),
        )
        self.stats = Stats()
        self._worker = Worker(settings, self._take)
        self._worker.start()
        self._ids = count()
        self._changed = threading.Condition()
        self._results: dict[int, Result] = {}
        self.order: list[int] = []
        self.whenever: Callable[[int], None] = lambda _: None
        self._thread = threading.Thread(target=self._worker.run, daemon=True)
        self._thread.start()

    def _take(self, message: object) -> None:
        if isinstance(message, Result):
            with self._changed:
                self._results[message.id] = message
                self.order.append(message.id)
                self._changed.notify_all()
            self.whenever(message.id)
        elif isinstance(message, Stats):
            self.stats = message

    def send(self, method: str, *args: object) -> int:
        number = next(self._ids)
        self._worker.put(Call(number, method, args))
        return number

    def wait(self, number: int) -> object:
        with self._changed:
            assert self._changed.wait_for(lambda: number in self._results, LIMIT_S)
        result = self._results[number]
        assert result.error is None, result.error
        return result.value

    def end(self) -> None:
        self.whenever = lambda _: None
        self._worker.put(None)
        self._thread.join(LIMIT_S)
        torch.set_num_threads(self._threads)
