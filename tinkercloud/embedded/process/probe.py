"""Whether the engine process still answers: it may be stopped, or stuck in a step."""

import asyncio
import time

from tinkercloud.embedded.process.host import EngineHost
from tinkercloud.embedded.process.protocol import Ping
from tinkercloud.errors import EngineDied

WAIT_S = 0.5
SILENCE_S = 30.0
"""Longer than any step takes, and than loading of most further base models."""


class EngineProbe:
    """One question at a time: an engine that is busy answers between two steps."""

    def __init__(self, host: EngineHost, *, silence_s: float = SILENCE_S):
        self._host = host
        self._silence_s = silence_s
        self._asked_at = 0.0
        self._question: asyncio.Task[None] | None = None

    async def silence(self) -> str | None:
        """How long the engine has not answered, in words; None: it has, or may be busy."""
        if self._question is None or self._question.done():
            self._asked_at = time.monotonic()
            self._question = asyncio.create_task(self._ask(), name="engine probe")
        await asyncio.wait([self._question], timeout=WAIT_S)
        silent_s = time.monotonic() - self._asked_at
        if self._question.done() or silent_s < self._silence_s:
            return None
        return f"the engine process has not answered for {silent_s:.0f} s"

    async def _ask(self) -> None:
        try:
            await self._host.call(Ping())
        except EngineDied:
            return  # it is being started again, and says so
