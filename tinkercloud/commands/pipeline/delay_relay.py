"""TCP connections through a delay and a narrow link, each way: any network on one machine."""

import asyncio
import threading
from contextlib import suppress

CHUNK_BYTES = 2**16


class DelayRelay:
    """To `port` on this machine, on the port `listen`; 0: a free one. Bytes leave in order,
    `delay_s` after they came; as many as come are underway at a time. bytes_per_s: that each way of
    a connection takes, before the delay; None: any number."""

    def __init__(
        self, port: int, delay_s: float, *, bytes_per_s: float | None = None, listen: int = 0
    ):
        self._target, self._delay_s = port, delay_s
        self._bytes_per_s, self._listen = bytes_per_s, listen
        self._ready = threading.Event()
        self._closing: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.port = 0
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run()), name="relay", daemon=True
        )
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        assert self._loop is not None and self._closing is not None
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    async def _run(self) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        async with await asyncio.start_server(self._connected, "127.0.0.1", self._listen) as server:
            self.port = server.sockets[0].getsockname()[1]
            self._ready.set()
            await self._closing.wait()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward, back = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            await asyncio.gather(self._way(reader, back), self._way(onward, writer))
        except (OSError, asyncio.CancelledError):
            pass  # one end has gone, or the relay ends
        finally:
            for each in (writer, back):
                each.close()
            for each in (writer, back):
                with suppress(OSError):
                    await each.wait_closed()

    async def _way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        underway: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        leaving = asyncio.ensure_future(self._leave(underway, writer))
        sent_s = 0.0  # when the link will have taken all that came
        try:
            while data := await reader.read(CHUNK_BYTES):
                sent_s = max(sent_s, self._now_s())
                if self._bytes_per_s is not None:
                    sent_s += len(data) / self._bytes_per_s
                underway.put_nowait((sent_s + self._delay_s, data))
            underway.put_nowait((max(sent_s, self._now_s()) + self._delay_s, b""))
            await leaving
        finally:
            leaving.cancel()

    async def _leave(
        self, underway: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter
    ) -> None:
        while True:
            due_s, data = await underway.get()
            await asyncio.sleep(max(0.0, due_s - self._now_s()))
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()

    def _now_s(self) -> float:
        assert self._loop is not None
        return self._loop.time()
