"""Futures for synchronous and asynchronous callers."""

import asyncio
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class APIFuture(Generic[T]):
    """`result()` blocks; `await` does not. Both work from any thread, any number of times.

    A timeout ends the wait, not the operation.
    """

    def __init__(self, future: "Future[T]"):
        self._future = future

    def result(self, timeout: float | None = None) -> T:
        """Raises TimeoutError after `timeout` seconds, or what the operation raised."""
        return self._future.result(timeout)

    async def result_async(self, timeout: float | None = None) -> T:  # noqa: ASYNC109 - the official name
        async with asyncio.timeout(timeout):
            # Shielded: a waiter that gives up must not cancel the operation for the others.
            return await asyncio.shield(asyncio.wrap_future(self._future))

    async def coroutine(self) -> T:
        return await self.result_async()

    def future(self) -> "Future[T]":
        """The underlying concurrent future, for `concurrent.futures.wait` and the like."""
        return self._future

    def done(self) -> bool:
        return self._future.done()

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()


class ClientFuture(APIFuture[T]):
    """The future of a client, usable as the client: public attributes wait for the client and are
    read from it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle look for these; they must not block
            raise AttributeError(name)
        return getattr(self.result(), name)
