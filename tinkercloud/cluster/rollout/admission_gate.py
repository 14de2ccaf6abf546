"""Admission of samples to the engines: open, or closed for any number of reasons at a time."""

import asyncio
import time
from collections.abc import Callable

from tinkercloud.cluster.rollout.engine_handle import EngineHandle
from tinkercloud.errors import EngineDied


class Gate:
    """Admits while it has no reason to be closed; counts the requests that were admitted."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._reasons: set[str] = set()
        self._running = 0

    @property
    def reasons(self) -> frozenset[str]:
        """Why it is closed; empty: it is open."""
        return frozenset(self._reasons)

    @property
    def running(self) -> int:
        return self._running

    async def enter(
        self, choose: Callable[[], EngineHandle | None], deadline_s: float
    ) -> EngineHandle:
        """Wait until the gate is open and `choose` returns an engine.

        deadline_s: by time.monotonic(). Raises what `choose` raises, and EngineDied at the
        deadline. Every `enter` needs its `leave`.
        """
        chosen: list[EngineHandle] = []

        # Engine and count are taken under the condition's lock: `shut` cannot come in between, so
        # after `shut` and `drain` no request is at any engine.
        def admits() -> bool:
            engine = choose()
            if engine is None or self._reasons:
                return False
            chosen.append(engine)
            return True

        async with self._changed:
            try:
                async with asyncio.timeout(deadline_s - time.monotonic()):
                    await self._changed.wait_for(admits)
            except TimeoutError:
                raise EngineDied("no sampling engine could take the request in time") from None
            chosen[-1].running += 1
            self._running += 1
            return chosen[-1]

    async def leave(self, engine: EngineHandle) -> None:
        engine.running -= 1
        self._running -= 1
        await self.notify()

    async def shut(self, reason: str) -> None:
        """Admit nobody from now on."""
        self._reasons.add(reason)
        await self.notify()

    async def drain(self) -> None:
        """Returns when no request runs."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._running == 0)

    async def open(self, reason: str) -> None:
        """Withdraw this reason."""
        self._reasons.discard(reason)
        await self.notify()

    async def notify(self) -> None:
        """Waiters look again: an engine or an adapter changed."""
        async with self._changed:
            self._changed.notify_all()
