"""The session of a ServiceClient: event loop, transport, heartbeat, counters."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx

from tinker_gmi.bodies.requests import (
    AuthTokenRequest,
    ClientConfigRequest,
    CreateSessionRequest,
    FinishReason,
    FinishSessionRequest,
    SessionHeartbeatRequest,
)
from tinker_gmi.bodies.responses import (
    AuthTokenResponse,
    ClientConfigResponse,
    CreateSessionResponse,
    SessionHeartbeatResponse,
    UntypedAPIFuture,
)
from tinker_gmi.bodies.wire_model import WireModel
from tinker_gmi.connection import settings
from tinker_gmi.connection.errors import APIError, APIStatusError, NotFoundError
from tinker_gmi.connection.event_loop import LoopThread, cancel_other_tasks
from tinker_gmi.connection.futures import APIFuture, ClientFuture
from tinker_gmi.connection.lane import Lane
from tinker_gmi.connection.polling import Poll, retrieve
from tinker_gmi.connection.progress import (
    ProgressCallback,
    QueueCallback,
    QueueLog,
    Report,
    RequestType,
    Work,
)
from tinker_gmi.connection.retries import HTTP_GONE
from tinker_gmi.connection.transport import Call, Transport, decoder

T = TypeVar("T")
ModelT = TypeVar("ModelT", bound=WireModel)

HEARTBEAT_PERIOD_S = 10.0

logger = logging.getLogger("tinker_gmi")


class Session:
    """Started by the first call that needs it; shared by all clients of one ServiceClient.

    Only coroutines of its event loop change its attributes, so there is no lock.
    """

    def __init__(
        self,
        transport: Transport,
        request: CreateSessionRequest,
        *,
        existing_id: str | None = None,
        on_progress: ProgressCallback | None = None,
    ):
        """existing_id: of a session that another client has started, and will finish."""
        self.transport = transport
        self.config = ClientConfigResponse()
        self._existing_id = existing_id
        self._on_progress = on_progress
        self._configuring: asyncio.Task[None] | None = None
        self._loop = LoopThread()
        self._request = request
        self._starting: asyncio.Task[str] | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._model_seq_ids = itertools.count()
        self._sampling_session_seq_ids = itertools.count()
        self._custom_loss_seq_ids = itertools.count()

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

    def next_custom_loss_seq_id(self) -> int:
        return next(self._custom_loss_seq_ids)

    async def retrieve(
        self,
        work: Work,
        decode: Callable[[httpx.Response], T],
        *,
        protobuf: bool = False,
        on_queue: QueueCallback | None = None,
    ) -> T:
        """The result of an acknowledged request; tells of its progress."""
        report = Report(work, self._on_progress, on_queue)
        poll = Poll(work.request_id, protobuf, work.type, report.pending)
        try:
            result = await retrieve(self.transport, poll, decode)
        except Exception as error:  # only reported
            report.ended(error)
            raise
        report.ended(None)
        return result

    async def result(
        self, work: Work, reply: type[ModelT], on_queue: QueueCallback | None = None
    ) -> ModelT:
        """The JSON result of an acknowledged request."""
        return await self.retrieve(work, decoder(reply), on_queue=on_queue)

    async def post_and_wait(
        self, path: str, body: WireModel, reply: type[ModelT], what: tuple[RequestType, str]
    ) -> ModelT:
        """Submit work and wait for its JSON result. what: its type and its subject."""
        acknowledgement = await self.transport.post(path, body, UntypedAPIFuture)
        work = Work(acknowledgement.request_id, *what)
        return await self.result(work, reply, QueueLog(f"{what[0]} of {what[1]}"))

    async def get(self, path: str, reply: type[ModelT]) -> ModelT:
        """Without starting the session."""
        await self.configured()
        return await self.transport.get(path, reply)

    async def post(
        self,
        path: str,
        body: WireModel,
        reply: type[ModelT],
        *,
        headers: Mapping[str, str] | None = None,
    ) -> ModelT:
        """Without starting the session."""
        await self.configured()
        return await self.transport.post(path, body, reply, headers=headers)

    async def configured(self) -> None:
        """What the server asks of its clients, at first use. Concurrent callers share the call."""
        if self._configuring is None or _failed(self._configuring):
            self._configuring = asyncio.create_task(self._configure())
        await asyncio.shield(self._configuring)

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
        await self.configured()
        if self._existing_id is not None:
            self._heartbeat = asyncio.create_task(self._beat(self._existing_id))
            return self._existing_id
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

    async def _configure(self) -> None:
        version = ClientConfigRequest(sdk_version=self._request.sdk_version)
        try:
            config = await self.transport.post("client/config", version, ClientConfigResponse)
        except NotFoundError:
            logger.debug("the server has no client/config; defaults apply")
            return
        self.config = config
        if config.billing_exception_max_pause_duration_sec is not None:
            self.transport.max_billing_pause_s = min(
                self.transport.max_billing_pause_s, config.billing_exception_max_pause_duration_sec
            )
        if config.pjwt_auth_enabled:
            by_command = config.credential_default_source == "credential_cmd"
            command = settings.credential_command() if by_command else None
            self.transport.credentials.use_tokens(self._token_for, command)

    async def token(self) -> str:
        """A token for the caller's key."""
        await self.configured()
        return await self._token_for(await self.transport.credentials.credential())

    async def _token_for(self, credential: str | None) -> str:
        headers = {} if credential is None else {"X-API-Key": credential}
        reply = await self.transport.post(
            "auth/token", AuthTokenRequest(), AuthTokenResponse, headers=headers
        )
        return reply.jwt

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
        session_id = self.started_id
        if session_id is not None and self._existing_id is None:
            body = FinishSessionRequest(reason=FinishReason(type=status), detail=detail)
            path = f"sessions/{session_id}/finish"
            content = body.model_dump_json().encode()
            try:
                await self.transport.send_once(Call("POST", path, content, timeout_s=10.0))
            except (APIError, httpx.HTTPError) as error:
                logger.warning("finishing the session failed: %s", error)
        await self.transport.close()


def _failed(task: "asyncio.Task[Any]") -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
