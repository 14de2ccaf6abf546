"""TCP connections through a delay, each way: a network of any round-trip time on one machine."""

import asyncio
import threading
from collections.abc import Awaitable
from contextlib import suppress

CHUNK_BYTES = 2**16


class DelayRelay:
    """To `port` on this machine, on a port of its own. Bytes leave in order, `delay_s` after they
    came; as many as come are underway at a time."""

    def __init__(self, port: int, delay_s: float):
        self._target, self._delay_s = port, delay_s
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self.port = 0
        threading.Thread(target=self._run, name="relay", daemon=True).start()
        self._ready.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        listening = asyncio.start_server(self._connected, "127.0.0.1", 0)
        server = self._loop.run_until_complete(listening)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        onward, back = await asyncio.open_connection("127.0.0.1", self._target)
        ways: list[Awaitable[None]] = [self._way(reader, back), self._way(onward, writer)]
        with suppress(ConnectionError, asyncio.CancelledError):
            await asyncio.gather(*ways)

    async def _way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        underway: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        leaving = asyncio.ensure_future(self._leave(underway, writer))
        while data := await reader.read(CHUNK_BYTES):
            underway.put_nowait((self._loop.time() + self._delay_s, data))
        underway.put_nowait((self._loop.time() + self._delay_s, b""))
        await leaving

    async def _leave(
        self, underway: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter
    ) -> None:
        while True:
            due_s, data = await underway.get()
            await asyncio.sleep(max(0.0, due_s - self._loop.time()))
            if not data:
                writer.close()
                return
            writer.write(data)
            await writer.drain()
