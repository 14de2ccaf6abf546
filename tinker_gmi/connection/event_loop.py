"""The asyncio event loop of a client, in a daemon thread."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for callers on any thread; starts at first use, stops with `close`."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[Any] | None] = set()
        self._state_lock = threading.Lock()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(self._referenced(coroutine), self._running())

    async def _referenced(self, coroutine: Coroutine[Any, Any, T]) -> T:
        # An event loop holds its tasks by weak references only: the garbage collector would destroy
        # a pending task that nothing else refers to, such as the lane of a dropped client.
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            return await coroutine
        finally:
            self._tasks.discard(task)

    def call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        self._running().call_soon_threadsafe(function, *arguments)

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Cancel all tasks and end the thread. Must not be called from the loop itself."""
        with self._state_lock:
            self._closed = True
            if self._loop is None or self._thread is None or self._loop.is_closed():
                return
            asyncio.run_coroutine_threadsafe(cancel_other_tasks(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._state_lock:
            if self._closed:
                raise RuntimeError("this client was closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="tinker_gmi", daemon=True
                )
                self._thread.start()
            return self._loop


async def cancel_other_tasks() -> None:
    """Cancel all tasks of the running loop but the caller's, and wait until they have ended."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
