"""A network between clients and the application, in memory: it delays, reorders, duplicates, loses
and cuts what it carries."""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.types import ASGIApp, Message

from tests.simulation.engine import OUT_OF_MEMORY
from tests.simulation.loop import PROCESS, Process, SimulatedLoop, in_process
from tests.simulation.schedule import NetworkFate, Outage


class NetworkError(Exception):
    """kind: "connect" (nobody listens), "read" (the connection broke), "timeout"."""

    def __init__(self, kind: str):
        super().__init__(kind)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    content_type: str
    body: bytes

    @property
    def tells_failure(self) -> bool:
        """Of a request that was acknowledged."""
        return self.status == 200 and self.body.startswith(b'{"error"')


@dataclass(frozen=True, slots=True)
class Sent:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(eq=False, slots=True)
class _Exchange:
    """One request on its way. gone: its client does not listen any more."""

    sent: Sent
    answer: "asyncio.Future[Answer]"
    fate: NetworkFate
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class Network:
    """on_message: called with "message" as each request reaches the server, with "answer" as each
    answer leaves it, and with "failed" then where that tells the failure of an operation."""

    def __init__(
        self,
        loop: SimulatedLoop,
        choices: random.Random,
        fate: Callable[[int], NetworkFate],
        outage: Outage | None,
        on_message: Callable[[str, str], None],
    ):
        self._loop = loop
        self._choices = choices
        self._fate = fate
        self._outage = outage
        self._outage_ends = float("-inf")
        self._on_message = on_message
        self._number = 0
        self._app: ASGIApp | None = None
        self._process: Process | None = None
        self._open: dict[_Exchange, None] = {}
        self._wire = Process("network")  # what is on its way arrives, whoever ends meanwhile

    def listen(self, app: ASGIApp, process: Process) -> None:
        self._app, self._process = app, process

    def calm(self) -> None:
        """No faults from now on."""
        self._fate = lambda number: "fine"
        self._outage = None
        self._outage_ends = float("-inf")

    def refuse(self) -> None:
        """Nobody listens any more; what is open stays."""
        self._app = self._process = None

    def hang_up(self) -> None:
        """Nobody listens any more; what was open breaks."""
        self.refuse()
        for exchange in list(self._open):
            self._fail(exchange, "read")
        self._open.clear()

    async def request(self, sent: Sent, timeout_s: float) -> Answer:
        """Raises NetworkError."""
        self._number += 1
        fate = self._fate(self._number)
        exchange = _Exchange(sent, self._loop.create_future(), fate)
        slow_s = self._choices.expovariate(0.3) if fate == "slow" else 0.0
        if self._outage is not None and self._number == self._outage.count:
            self._outage_ends = self._loop.now + self._outage.for_s
        held_s = self._outage_ends - self._loop.now
        if held_s > 0:
            self._fail(exchange, "read")
            late_s = held_s + self._choices.expovariate(0.3)
            self._loop.call_later(late_s, self._arrive_again, exchange)
        else:
            self._loop.call_later(self._latency_s() + slow_s, self._arrive, exchange)
        if fate == "duplicate":
            rate = self._choices.choice((0.5, 300.0))  # often just behind it
            self._loop.call_later(self._choices.expovariate(rate), self._arrive_again, exchange)
        try:
            async with asyncio.timeout(timeout_s):
                return await exchange.answer
        except TimeoutError:
            raise NetworkError("timeout") from None
        finally:
            exchange.gone.set()

    def _latency_s(self) -> float:
        return self._choices.expovariate(300.0)

    def _arrive(self, exchange: _Exchange) -> None:
        if exchange.fate == "lose request":
            self._fail(exchange, "read")
        elif self._app is None or self._process is None:
            self._fail(exchange, "connect")
        else:
            self._on_message("message", exchange.sent.path)
            if self._app is None or self._process is None:  # it ended just now
                self._fail(exchange, "read")
                return
            self._open[exchange] = None
            in_process(self._process, self._loop.create_task, self._serve(self._app, exchange))

    def _arrive_again(self, exchange: _Exchange) -> None:
        """A copy whose answer nobody reads."""
        copy = _Exchange(exchange.sent, self._loop.create_future(), "fine")
        copy.gone.set()
        copy.answer.add_done_callback(lambda done: done.exception())
        self._arrive(copy)

    async def _serve(self, app: ASGIApp, exchange: _Exchange) -> None:
        conversation, process = _Conversation(exchange), PROCESS.get()
        try:
            await app(_scope(exchange.sent), conversation.receive, conversation.send)
        except Exception as error:  # noqa: BLE001 - as a server does; a run with problems fails
            # Not of what was hung up: what it needs is closed, and nobody hears of it.
            if process.alive and exchange in self._open:
                self._loop.problems.append(f"{exchange.sent.path} raised {error!r}")
        is_open = exchange in self._open
        self._open.pop(exchange, None)
        if exchange.fate in ("lose answer", "cut") or conversation.answer is None:
            self._fail(exchange, "read")
            return
        body = conversation.answer.body
        if is_open and conversation.answer.status == 500 and OUT_OF_MEMORY.encode() not in body:
            self._loop.problems.append(f"{exchange.sent.path} was answered {body!r}")
        self._on_message("answer", exchange.sent.path)
        if conversation.answer.tells_failure:
            self._on_message("failed", exchange.sent.path)
        self._later(_deliver, exchange, conversation.answer)

    def _fail(self, exchange: _Exchange, kind: str) -> None:
        def fail() -> None:
            if not exchange.answer.done():
                exchange.answer.set_exception(NetworkError(kind))
                exchange.answer.exception()  # retrieved: its client may have vanished
            exchange.gone.set()

        self._later(fail)

    def _later(self, function: Callable[..., None], *args: Any) -> None:
        in_process(self._wire, self._loop.call_later, self._latency_s(), function, *args)


def _deliver(exchange: _Exchange, answer: Answer) -> None:
    if not exchange.answer.done():
        exchange.answer.set_result(answer)


class _Conversation:
    """The application's side of one exchange."""

    def __init__(self, exchange: _Exchange):
        self._exchange = exchange
        self._given = False
        self._start: Message | None = None
        self._body = bytearray()
        self.answer: Answer | None = None

    async def receive(self) -> Message:
        body = self._exchange.sent.body
        if not self._given:
            self._given = True
            if self._exchange.fate == "cut":  # it breaks in the middle of the body
                return {"type": "http.request", "body": body[: len(body) // 2], "more_body": True}
            return {"type": "http.request", "body": body, "more_body": False}
        if self._exchange.fate != "cut":
            await self._exchange.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        await asyncio.sleep(0.0)  # others go on, and it may be cancelled
        if not message.get("more_body", False):
            assert self._start is not None
            headers = dict(self._start["headers"])
            kind = headers.get(b"content-type", b"").decode()
            self.answer = Answer(self._start["status"], kind, bytes(self._body))


def _scope(sent: Sent) -> dict[str, Any]:
    path, _, query = sent.path.partition("?")
    headers = {**sent.headers, "content-length": str(len(sent.body))}
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": sent.method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 50000),
        "server": ("server", 80),
        "state": {},
    }


class HttpxTransport(httpx.AsyncBaseTransport):
    """The same network for clients that speak through httpx."""

    def __init__(self, network: Network):
        self._network = network

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode()
        body = await request.aread()
        sent = Sent(request.method, path, dict(request.headers), body)
        timeout_s = request.extensions["timeout"]["read"]
        try:
            answer = await self._network.request(sent, timeout_s)
        except NetworkError as error:
            kinds = {"connect": httpx.ConnectError, "timeout": httpx.ReadTimeout}
            raise kinds.get(error.kind, httpx.ReadError)(error.kind, request=request) from None
        headers = {"content-type": answer.content_type}
        return httpx.Response(answer.status, headers=headers, content=answer.body, request=request)
