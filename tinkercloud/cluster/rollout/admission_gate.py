"""The gate before the engines: who may pass, and until when nobody does."""

import asyncio
import time
from collections.abc import Callable

from tinkercloud.cluster.rollout.engine_handle import EngineHandle
from tinkercloud.errors import EngineDied


class Gate:
    """Closed for any number of reasons at a time; counts what runs behind it."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._reasons: set[str] = set()
        self._running = 0

    @property
    def reasons(self) -> frozenset[str]:
        """Why it is closed; none: it is open."""
        return frozenset(self._reasons)

    @property
    def running(self) -> int:
        return self._running

    async def enter(
        self, choose: Callable[[], EngineHandle | None], deadline_s: float
    ) -> EngineHandle:
        """Wait until the gate is open and `choose` has an engine, by time.monotonic() at most.

        Raises what `choose` raises, and EngineDied at the deadline. Answer with `leave`.
        """
        chosen: list[EngineHandle] = []

        def able() -> bool:
            engine = choose()
            if engine is None or self._reasons:
                return False
            chosen.append(engine)
            return True

        async with self._changed:
            try:
                async with asyncio.timeout(deadline_s - time.monotonic()):
                    await self._changed.wait_for(able)
            except TimeoutError:
                raise EngineDied("no sampling engine could take the request in time") from None
            chosen[-1].running += 1
            self._running += 1
            return chosen[-1]

    async def leave(self, engine: EngineHandle) -> None:
        engine.running -= 1
        self._running -= 1
        await self.tell()

    async def shut(self, reason: str) -> None:
        """Nobody enters any more."""
        self._reasons.add(reason)
        await self.tell()

    async def empty(self) -> None:
        """Returns when nothing runs."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._running == 0)

    async def open(self, reason: str) -> None:
        """Take this reason back."""
        self._reasons.discard(reason)
        await self.tell()

    async def tell(self) -> None:
        """Whoever waits looks again: something else changed."""
        async with self._changed:
            self._changed.notify_all()
