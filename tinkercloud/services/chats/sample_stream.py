"""Samples of one request while they are drawn, for whoever reads them as an iterator."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from tinkercloud.core.types import OnTokens, TokenChunk
from tinkercloud.services.models.sampling_service import DrawnSample

Draw = Callable[[OnTokens], Awaitable[DrawnSample]]


class SampleStream:
    """drawn: the whole of it, once `chunks` has ended by itself."""

    def __init__(self, draw: Draw):
        self._draw = draw
        self.drawn: DrawnSample | None = None

    async def chunks(self) -> AsyncGenerator[TokenChunk, None]:
        """Closing the iterator, or cancelling whoever reads it, ends the samples."""
        # As long as the answers at most: the sampler never waits for a slow reader.
        queue: asyncio.Queue[TokenChunk | None] = asyncio.Queue()
        task = asyncio.ensure_future(self._draw(queue.put_nowait))
        task.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (chunk := await queue.get()) is not None:
                yield chunk
            self.drawn = await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
