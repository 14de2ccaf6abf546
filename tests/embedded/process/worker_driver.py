"""A worker in a thread of its own, for tests that call it as the server does."""

import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TypeVar

import torch

from tinkercloud.config import DraftConfig, EngineConfig, ModelSource
from tinkercloud.embedded.process.protocol import (
    Call,
    EngineSettings,
    Ping,
    Request,
    Result,
    Stats,
)
from tinkercloud.embedded.process.served_models import open_models
from tinkercloud.embedded.process.worker import Worker

LIMIT_S = 120.0

R = TypeVar("R")


class Driver:
    """Calls to a worker that runs in a thread, and its answers in the order they came."""

    def __init__(
        self,
        folder: Path,
        scratch: Path,
        speculate: str = "off",
        draft_share: float = 0.1,
        draft: DraftConfig | None = None,
    ):
        """Drafts are in `scratch`."""
        self._threads = torch.get_num_threads()
        engine = EngineConfig(
            threads=1,
            max_batch=4,
            kv_cache_bytes=2**26,
            version_cache_bytes=2**26,
            activation_bytes=2**28,
            draft_memory_bytes=2**26,
        )
        # Past the bounds of the setting: the tiny model's steps are too short for a share of 1.
        object.__setattr__(engine, "draft_share", draft_share)
        settings = EngineSettings(
            models=(ModelSource("tiny", folder),),
            dtype="float32",
            cache_dir=scratch,
            drafts_dir=scratch,
            speculate=speculate,
            speculate_trace=None,
            engine=engine,
            draft=draft or DraftConfig(),
        )
        self.stats = Stats()
        _, models = open_models(settings)
        self._worker = Worker(settings, models, self._take)
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

    def send(self, request: Request[object]) -> int:
        number = next(self._ids)
        self._worker.put(Call(number, request))
        return number

    def result(self, number: int) -> Result:
        with self._changed:
            assert self._changed.wait_for(lambda: number in self._results, LIMIT_S)
        return self._results[number]

    def wait(self, number: int) -> object:
        result = self.result(number)
        assert result.error is None, result.error
        return result.value

    def call(self, request: Request[R]) -> R:
        return self.wait(self.send(request))

    def send_at_once(self, *requests: Request[object]) -> list[int]:
        """The worker finds all of them when it looks for the next one; all are answered."""
        sent, are_sent = list[int](), threading.Event()

        def send_all(number: int) -> None:
            """In the worker's thread."""
            self.whenever = lambda _: None
            sent.extend(self.send(each) for each in requests)
            are_sent.set()

        self.whenever = send_all
        self.call(Ping())
        assert are_sent.wait(LIMIT_S)
        for number in sent:
            self.wait(number)
        return sent

    def end(self) -> None:
        self.whenever = lambda _: None
        self._worker.put(None)
        self._thread.join(LIMIT_S)
        torch.set_num_threads(self._threads)
