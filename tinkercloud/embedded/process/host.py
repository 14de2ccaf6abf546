"""The API process's side of the engine process: starts it, calls it, restarts it when it dies.

An engine says first what it serves, and then that it has loaded the weights. Calls wait until then.
"""

import asyncio
import itertools
import logging
import pickle
import signal
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, TypeVar

from tinkercloud.config import engine_environment
from tinkercloud.core.types import OnTokens, ServedModel
from tinkercloud.embedded.process.protocol import (
    HEADER,
    Call,
    Cancel,
    EngineSettings,
    Ready,
    Request,
    Result,
    Sample,
    Serves,
    StartFailed,
    Stats,
    Tokens,
    decode_error,
    pack,
)
from tinkercloud.errors import ConfigError, EngineDied

logger = logging.getLogger(__name__)

RESTART_WINDOW_S = 600.0
LONGEST_WAIT_S = 30.0
MAX_FIRST_STARTS = 3
"""Of an engine that has never loaded its model: what killed it may have been an accident."""

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _PendingCall:
    future: asyncio.Future[Any]
    on_tokens: OnTokens | None


class EngineHost:
    """Supervises one engine process. `call` is safe from any task of one event loop."""

    def __init__(self, settings: EngineSettings):
        self._settings = settings
        self._ids = itertools.count()
        self._pending: dict[int, _PendingCall] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._first_load_ended = asyncio.Event()
        self._refusal: ConfigError | None = None
        self._num_ended = 0
        self._stopping = False
        self._starts: deque[float] = deque()
        self.incarnation = -1
        """Of engines that have said what they serve, the first being 0."""
        self.numerics = ""
        self.stats = Stats()

    async def start(self) -> tuple[ServedModel, ...]:
        """Start the engine and wait until it says what it serves. Raises ConfigError when it
        cannot."""
        reader, served = await self._spawn()
        self._supervisor = asyncio.create_task(self._supervise(reader), name="engine-supervisor")
        return served

    async def loaded(self) -> None:
        """Until an engine has loaded its model. Raises ConfigError when none can; calls then wait
        until `stop`."""
        await self._first_load_ended.wait()
        if self._refusal is not None:
            raise self._refusal

    async def stop(self) -> None:
        """End the engine; calls underway fail with EngineDied."""
        self._stopping = True
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._process is not None and self._process.returncode is None and not self.alive:
            self._process.kill()  # it listens only once it has loaded
        await self._end_process()
        self._fail_pending("the server is shutting down")

    async def call(self, request: Request[R], on_tokens: OnTokens | None = None) -> R:
        """Have the engine process serve the request. While the engine starts, this waits.

        on_tokens: gets the tokens of a sample that streams. Cancelling the call ends a sample;
        other requests are served to their end, without a reader of their result.
        """
        if not self._up.is_set():
            await self._up.wait()
        if self._writer is None:
            raise EngineDied("the engine is not running")
        call_id = next(self._ids)
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = _PendingCall(future, on_tokens)
        self._writer.write(pack(Call(call_id, request)))
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(call_id, request)
            raise

    def _cancel(self, call_id: int, request: Request[Any]) -> None:
        # Not pending: it has its result, or its engine is gone.
        pending = self._pending.pop(call_id, None)
        if pending is not None and isinstance(request, Sample) and self._writer is not None:
            self._writer.write(pack(Call(next(self._ids), Cancel(call_id))))

    @property
    def alive(self) -> bool:
        """Whether it serves; if not, it is being started."""
        return self._up.is_set()

    @property
    def trouble(self) -> str | None:
        """Why it does not serve, in words; None: it does."""
        if self.alive:
            return None
        if self._num_ended == 0:
            return "the engine is loading its model"
        return "the engine process ended and is being started again"

    # ---- the process

    async def _spawn(self) -> tuple[asyncio.StreamReader, tuple[ServedModel, ...]]:
        try:
            reader = await self._connected_process()
        except OSError as error:  # out of memory or of descriptors, mostly
            raise ConfigError(f"no engine process can be started: {error}") from None
        assert self._writer is not None
        assert self._process is not None
        self._writer.write(pack(self._settings))
        try:
            first = await _read(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._end_process()
            code = self._process.returncode
            raise ConfigError(f"the engine process ended with code {code} while starting") from None
        if isinstance(first, StartFailed):
            await self._end_process()
            raise ConfigError(first.reason)
        assert isinstance(first, Serves)
        # Before a call is served by this engine: its caller may have models of an earlier one.
        self.incarnation += 1
        self.numerics = first.numerics
        return reader, first.served

    async def _connected_process(self) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            try:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "tinkercloud.embedded.process.worker", str(fd),
                    pass_fds=(fd,), env=engine_environment(),
                )  # fmt: skip
            except OSError:
                ours.close()
                raise
        reader, self._writer = await asyncio.open_connection(sock=ours)
        return reader

    async def _end_process(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._process is None or self._process.returncode is not None:
            return
        try:
            await asyncio.wait_for(self._process.wait(), 5)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _supervise(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                await self._serve(reader)
                reader = await self._restart()
        except ConfigError as refusal:
            self._refusal = refusal
            self._first_load_ended.set()

    async def _serve(self, reader: asyncio.StreamReader) -> None:
        """Until the process is gone. Raises ConfigError where there shall not be another."""
        failure = await self._read_until_gone(reader)
        assert self._process is not None
        self._up.clear()  # first: calls from now on wait for the next engine
        self._num_ended += 1
        await self._end_process()
        code = self._process.returncode
        assert code is not None
        if failure is None:
            logger.error("the engine process ended with code %s", code)
        else:
            logger.error("the engine did not start again: %s", failure)
        if not self._first_load_ended.is_set():
            self._check_first_load(failure, code)
        self._fail_pending(
            f"the engine process ended (code {code}) while it held this request; it is being "
            "started again and the models are restored"
        )

    def _check_first_load(self, failure: str | None, code: int) -> None:
        """Raises ConfigError where another start would end as this one."""
        if failure is not None:
            raise ConfigError(failure)
        if code >= 0:
            raise ConfigError(f"the engine process ended with code {code} while loading its model")
        if self._num_ended == MAX_FIRST_STARTS:
            raise ConfigError(
                f"the engine process was ended by {signal.Signals(-code).name} {MAX_FIRST_STARTS} "
                "times while it loaded its model; where memory runs out the system does that"
            )

    async def _restart(self) -> asyncio.StreamReader:
        """A new engine: the first at once, others after a wait that doubles with each, so that
        one that cannot live does not take the machine. Raises ConfigError where none has ever
        loaded its model."""
        while True:
            now = time.monotonic()
            while self._starts and self._starts[0] < now - RESTART_WINDOW_S:
                self._starts.popleft()
            await asyncio.sleep(restart_wait_s(len(self._starts)))
            self._starts.append(time.monotonic())
            try:
                reader, _ = await self._spawn()
            except ConfigError as error:
                if not self._first_load_ended.is_set():
                    raise
                logger.error("the engine did not start again: %s", error)
                continue
            return reader

    async def _read_until_gone(self, reader: asyncio.StreamReader) -> str | None:
        """Why the engine ended, where it said so."""
        failure = None
        while True:
            try:
                message = await _read(reader)
            except (asyncio.IncompleteReadError, ConnectionError):
                return failure
            if isinstance(message, Ready):
                self._up.set()
                self._first_load_ended.set()
            elif isinstance(message, StartFailed):
                failure = message.reason
            elif isinstance(message, Stats):
                self.stats = message
            elif isinstance(message, Tokens):
                self._stream(message)
            elif isinstance(message, Result):
                self._settle(message)

    def _stream(self, tokens: Tokens) -> None:
        for call_id, chunk in tokens.chunks:
            call = self._pending.get(call_id)
            # Done: it was cancelled, and its task has not run since.
            if call is not None and call.on_tokens is not None and not call.future.done():
                call.on_tokens(chunk)

    def _settle(self, result: Result) -> None:
        call = self._pending.pop(result.id, None)
        if call is None or call.future.done():
            return
        future = call.future
        if result.error is not None:
            future.set_exception(decode_error(result.error))
        else:
            future.set_result(result.value)

    def _fail_pending(self, reason: str) -> None:
        pending, self._pending = self._pending, {}
        for call in pending.values():
            if not call.future.done():
                call.future.set_exception(EngineDied(reason))


def restart_wait_s(num_starts: int) -> float:
    """Before another start, after so many recent ones."""
    return 0.0 if num_starts == 0 else min(2.0 ** (num_starts - 2), LONGEST_WAIT_S)


async def _read(reader: asyncio.StreamReader) -> object:
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return pickle.loads(await reader.readexactly(length))
