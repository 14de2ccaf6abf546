"""The session of a ServiceClient: event loop, transport, heartbeat, counters; and the lanes."""

import asyncio
import functools
import itertools
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx

from tinker_gmi.bodies.requests import (
    ClientConfigRequest,
    CreateSessionRequest,
    FinishReason,
    FinishSessionRequest,
    SessionHeartbeatRequest,
)
from tinker_gmi.bodies.responses import (
    ClientConfigResponse,
    CreateSessionResponse,
    SessionHeartbeatResponse,
    UntypedAPIFuture,
)
from tinker_gmi.bodies.wire_model import WireModel
from tinker_gmi.connection.errors import APIError, APIStatusError, NotFoundError
from tinker_gmi.connection.event_loop import LoopThread, cancel_other_tasks
from tinker_gmi.connection.futures import APIFuture, ClientFuture
from tinker_gmi.connection.transport import Call, Transport, decoder

T = TypeVar("T")
ModelT = TypeVar("ModelT", bound=WireModel)
Operation = Callable[[], Coroutine[Any, Any, T]]

HEARTBEAT_PERIOD_S = 10.0
HTTP_GONE = 410

logger = logging.getLogger("tinker_gmi")


class Session:
    """Started by the first call that needs it; shared by all clients of one ServiceClient.

    Only coroutines of its event loop change its attributes, so there is no lock.
    """

    def __init__(self, transport: Transport, request: CreateSessionRequest):
        self.transport = transport
        self.config = ClientConfigResponse()
        self._loop = LoopThread()
        self._request = request
        self._starting: asyncio.Task[str] | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._model_seq_ids = itertools.count()
        self._sampling_session_seq_ids = itertools.count()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> APIFuture[T]:
        """Run a coroutine in the session's event loop."""
        return APIFuture(self._submit(coroutine))

    def submit_client(self, coroutine: Coroutine[Any, Any, T]) -> ClientFuture[T]:
        """As `submit`, of a coroutine that creates a client."""
        return ClientFuture(self._submit(coroutine))

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        try:
            return self._loop.submit(coroutine)
        except RuntimeError:
            coroutine.close()  # never awaited: the client was closed
            raise

    def lane(self) -> "Lane":
        return Lane(self._loop)

    async def session_id(self) -> str:
        """Starts the session at first use. Concurrent callers share one start."""
        if self._starting is None or _failed(self._starting):
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    @property
    def started_id(self) -> str | None:
        """The session's id, None before its start."""
        task = self._starting
        return None if task is None or not task.done() or _failed(task) else task.result()

    def next_model_seq_id(self) -> int:
        return next(self._model_seq_ids)

    def next_sampling_session_seq_id(self) -> int:
        return next(self._sampling_session_seq_ids)

    async def result(self, request_id: str, reply: type[ModelT]) -> ModelT:
        """The JSON result of an acknowledged request."""
        return await self.transport.retrieve(request_id, decoder(reply))

    async def post_and_wait(self, path: str, body: WireModel, reply: type[ModelT]) -> ModelT:
        """Submit work and wait for its JSON result."""
        acknowledgement = await self.transport.post(path, body, UntypedAPIFuture)
        return await self.result(acknowledgement.request_id, reply)

    def close(self, status: str, detail: str | None) -> None:
        """Finish the session on the server, then end the loop; pending calls are cancelled.
        Idempotent."""
        if self._loop.closed:
            return
        try:
            self._submit(self._finish(status, detail)).result()
        finally:
            self._loop.close()

    async def _start(self) -> str:
        version = ClientConfigRequest(sdk_version=self._request.sdk_version)
        try:
            self.config = await self.transport.post("client/config", version, ClientConfigResponse)
        except NotFoundError:
            logger.debug("the server has no client/config; defaults apply")
        reply = await self.transport.post("create_session", self._request, CreateSessionResponse)
        for level, text in (
            (logging.INFO, reply.info_message),
            (logging.WARNING, reply.warning_message),
            (logging.ERROR, reply.error_message),
        ):
            if text:
                logger.log(level, "%s", text)
        self._heartbeat = asyncio.create_task(self._beat(reply.session_id))
        return reply.session_id

    async def _beat(self, session_id: str) -> None:
        body = SessionHeartbeatRequest(session_id=session_id)
        while True:
            await asyncio.sleep(HEARTBEAT_PERIOD_S)
            try:
                await self.transport.post("session_heartbeat", body, SessionHeartbeatResponse)
            except APIStatusError as error:
                if error.status_code == HTTP_GONE:
                    return
                logger.warning("heartbeat: %s", error)
            except APIError as error:
                logger.warning("heartbeat: %s", error)

    async def _finish(self, status: str, detail: str | None) -> None:
        await cancel_other_tasks()  # before the transport closes, or they would fail on it
        if self._starting is not None and self._starting.done() and not _failed(self._starting):
            body = FinishSessionRequest(reason=FinishReason(type=status), detail=detail)
            path = f"sessions/{self._starting.result()}/finish"
            content = body.model_dump_json().encode()
            try:
                await self.transport.send_once(Call("POST", path, content, timeout_s=10.0))
            except (APIError, httpx.HTTPError) as error:
                logger.warning("finishing the session failed: %s", error)
        await self.transport.close()


class Lane:
    """The requests of one model, posted one after another in the order of submission.

    An operation holds the lane until the server has acknowledged its requests; results are awaited
    outside. Sequence numbers are assigned when a request is posted, so an operation that fails
    before that leaves no gap.
    """

    def __init__(self, loop: LoopThread):
        self._loop = loop
        self._queue: asyncio.Queue[tuple[Operation[Any], Future[Any]]] = asyncio.Queue()
        self._seq_ids = itertools.count(1)  # 0 is the creation of the model
        self._worker = loop.submit(self._run())

    def submit(self, operation: Operation[T]) -> "Future[T]":
        """Queue an operation; from any thread."""
        outcome: Future[T] = Future()
        self._loop.call_soon(self._queue.put_nowait, (operation, outcome))
        return outcome

    def next_seq_id(self) -> int:
        """Only for the operation that holds the lane."""
        return next(self._seq_ids)

    async def _run(self) -> None:
        while True:
            operation, outcome = await self._queue.get()
            if not outcome.set_running_or_notify_cancel():
                continue  # cancelled before it was posted
            task = asyncio.create_task(operation())
            task.add_done_callback(functools.partial(_settle, outcome))
            await asyncio.wait([task])  # does not raise what the task raised


def _settle(outcome: "Future[T]", task: "asyncio.Task[T]") -> None:
    if task.cancelled():  # by `cancel_other_tasks`
        outcome.set_exception(RuntimeError("this client was closed"))
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


def _failed(task: "asyncio.Task[Any]") -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
