"""Large JSON bodies, parsed and validated in processes of their own.

A JSON parser holds the GIL for its whole run, in whatever thread: 8 MiB of brackets stop the event
loop for half a second. What comes back is of the asked type, and smaller than what was parsed.
"""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from tinkercloud.errors import PayloadTooLarge
from tinkercloud.services.common.parser_worker import read_message, write_message

LARGE_BYTES = 1024 * 1024
"""Bodies above wait for each other only."""

T = TypeVar("T")


class BodyParser:
    """Starts its processes when they are needed."""

    def __init__(self) -> None:
        self._small, self._large = _ParserProcess(), _ParserProcess()

    async def run(self, parse: Callable[[bytes], T], body: bytes) -> T:
        """parse: a function of a module, which may raise errors of `errors.py`. Raises
        PayloadTooLarge where it takes too much memory."""
        process = self._small if len(body) <= LARGE_BYTES else self._large
        return await process.run(parse, body)

    def close(self) -> None:
        self._small.close()
        self._large.close()


class _ParserProcess:
    """One process and the thread that waits for it. A call goes on where its caller gave up, so
    that jobs and answers stay in step."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "json-bodies")
        self._process: subprocess.Popen[bytes] | None = None

    async def run(self, parse: Callable[[bytes], T], body: bytes) -> T:
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._thread, self._answer, parse, body)
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        self._thread.submit(self._end)
        self._thread.shutdown()

    def _answer(self, parse: Callable[[bytes], T], body: bytes) -> T | Exception:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_message(process.stdin, (parse, body))
            result, is_last = read_message(process.stdout)
        except (EOFError, OSError):  # it was ended, as by a system that is short of memory
            self._end()  # here: for a moment it is still one that runs
            return PayloadTooLarge(
                f"the process that parses JSON ended over a body of {len(body)} bytes; send less "
                "in one request"
            )
        if is_last:
            self._end()
        return result

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            command = [sys.executable, "-m", "tinkercloud.services.common.parser_worker"]
            self._process = subprocess.Popen(  # not ended by the Ctrl-C that stops the server
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what was not written to one that has ended
                pipe.close()
        process.wait()
