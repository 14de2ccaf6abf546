"""The order of one model's requests."""

import asyncio
import functools
import itertools
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from tinker_gmi.connection.event_loop import LoopThread

T = TypeVar("T")
Operation = Callable[[], Coroutine[Any, Any, T]]


class Lane:
    """The requests of one model, posted one after another in the order of submission.

    An operation holds the lane until the server has acknowledged its requests; results are awaited
    outside. Sequence numbers are assigned when a request is posted, so an operation that fails
    before that leaves no gap.
    """

    def __init__(self, loop: LoopThread):
        self._loop = loop
        self._queue: asyncio.Queue[tuple[Operation[Any], Future[Any]]] = asyncio.Queue()
        self._seq_ids = itertools.count(1)  # 0 is the creation of the model
        self._worker = loop.submit(self._run())

    def submit(self, operation: Operation[T]) -> "Future[T]":
        """Queue an operation; from any thread."""
        outcome: Future[T] = Future()
        self._loop.call_soon(self._queue.put_nowait, (operation, outcome))
        return outcome

    def next_seq_id(self) -> int:
        """Only for the operation that holds the lane."""
        return next(self._seq_ids)

    async def _run(self) -> None:
        while True:
            operation, outcome = await self._queue.get()
            if not outcome.set_running_or_notify_cancel():
                continue  # cancelled before it was posted
            task = asyncio.create_task(operation())
            task.add_done_callback(functools.partial(_settle, outcome))
            await asyncio.wait([task])  # does not raise what the task raised


def _settle(outcome: "Future[T]", task: "asyncio.Task[T]") -> None:
    if task.cancelled():  # by `cancel_other_tasks`
        outcome.set_exception(RuntimeError("this client was closed"))
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())
