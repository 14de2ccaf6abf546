"""A target worker: sessions of many clients, whose drafts a model verifies, without the transport.

One thread computes (`run`). A session is its tokens and what they are drawn with; keys and values
lie among the engine's blocks, where the next round finds them as any prompt's. All drafts that have
come are verified in one pass, those of a tree as its paths from root to leaf: they share what was
computed before them, and of their verdicts the longest is the tree's.
"""

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from tinkercloud.core.types import (
    SampledSequence,
    SampleOutput,
    SampleRequest,
    SamplingParams,
    num_equal,
)
from tinkercloud.errors import TinkercloudError
from tinkercloud.speculative.remote import target_pb2 as pb
from tinkercloud.speculative.remote.messages import BadMessage, check_tokens, params_of
from tinkercloud.speculative.remote.stream_worker import Connection, StreamWorker
from tinkercloud.speculative.remote.target_messages import PROTOCOL, TargetModel
from tinkercloud.speculative.remote.trees import paths_of

logger = logging.getLogger(__name__)

MAX_UNCACHED = 256
"""Tokens that are new to a session, beyond which only the first path of a tree is verified: the
others would compute them too."""
Output = SampleOutput | BaseException


class Engine(Protocol):
    """That verifies; all calls come from the computing thread."""

    @property
    def busy(self) -> bool: ...

    def submit(self, request: SampleRequest, reply: Callable[[Output], None]) -> Any:
        """Replies inside `step`. Returns what `cancel` takes. Raises UserError."""
        ...

    def cancel(self, job: Any) -> None:
        """Of an unfinished one, between steps; replies."""
        ...

    def step(self) -> None: ...

    def fail_all(self, error: BaseException) -> None: ...


@dataclass(frozen=True, slots=True)
class TargetLimits:
    """num_sessions: of all clients; beyond, the one that was used longest ago is forgotten, and so
    are those that were not used for idle_s. num_tokens: of a session. num_drafted: of a round."""

    num_sessions: int = 256
    idle_s: float = 600.0
    num_tokens: int = 131_072
    num_drafted: int = 128
    num_paths: int = 16


@dataclass(eq=False, slots=True)
class _Round:
    """That is computed. jobs: the engine's, by the number of the path; longest: of those that are
    back."""

    session: "_Session"
    number: int
    paths: Sequence[tuple[int, ...]]
    jobs: dict[int, Any] = field(default_factory=dict[int, Any])
    longest: SampledSequence | None = None
    num_cached: int = 0


@dataclass(eq=False, slots=True)
class _Session:
    connection: "ClientConnection"
    id: int  # at the client
    params: SamplingParams
    used_s: float
    tokens: list[int] = field(default_factory=list[int])
    round: _Round | None = None


@dataclass(eq=False)
class ClientConnection(Connection):
    is_welcome: bool = False
    sessions: dict[int, _Session] = field(default_factory=dict[int, _Session])


class TargetWorker(StreamWorker[ClientConnection]):
    def __init__(self, model: TargetModel, engine: Engine, limits: TargetLimits | None = None):
        self._limits = limits or TargetLimits()
        super().__init__(ClientConnection, self._limits.idle_s)
        self._model, self._engine = model, engine
        self._sessions: OrderedDict[_Session, None] = OrderedDict()  # the longest unused first
        self._returned: deque[tuple[_Round, int, Output]] = deque()
        self.counts: Counter[str] = Counter()

    def stats(self) -> dict[str, int]:
        return {**super().stats(), "sessions": len(self._sessions), **self.counts}

    def step(self, wait_s: float = 0.0) -> bool:
        """What has come is begun, and a pass computed; whether there was anything."""
        messages = self._take(0.0 if self._engine.busy else wait_s)
        for connection, message in messages:
            if connection in self._open:
                self._handle(connection, message)
        is_busy = self._engine.busy
        if is_busy:
            self._compute()
        self._forget_idle()
        return is_busy or bool(messages)

    def close(self, connection: ClientConnection) -> None:
        for session in list(connection.sessions.values()):
            self._end(session)
        super().close(connection)

    # ---- what clients say

    def _handle(self, connection: ClientConnection, message: pb.ToTarget | None) -> None:
        try:
            if message is None:
                self.close(connection)
            elif message.HasField("hello"):
                self._greet(connection, message.hello)
            elif not connection.is_welcome:
                raise BadMessage("a request before the client was welcome")
            elif message.HasField("open"):
                self._begin(connection, message.open)
            elif message.HasField("verify"):
                self._verify(connection, message.verify)
            elif message.HasField("end"):
                session = connection.sessions.get(message.end.id)
                if session is not None:
                    self._end(session)
            else:
                raise BadMessage("a message of no known kind")
        except BadMessage as error:
            logger.warning("client %d is refused: %s", connection.number, error)
            connection.send(pb.FromTarget(refusal=pb.Refusal(reason=str(error))))
            self.close(connection)

    def _greet(self, connection: ClientConnection, hello: pb.Hello) -> None:
        """Raises BadMessage."""
        if hello.protocol != PROTOCOL:
            raise BadMessage(f"the client speaks protocol {hello.protocol}, this worker {PROTOCOL}")
        connection.is_welcome = True
        self._send(connection, self._model.welcome(with_tokenizer=hello.needs_tokenizer))

    def _begin(self, connection: ClientConnection, message: pb.Open) -> None:
        """Raises BadMessage."""
        if message.id in connection.sessions:
            raise BadMessage(f"session {message.id} is open")
        session = _Session(connection, message.id, params_of(message.params), time.monotonic())
        connection.sessions[message.id] = session
        self._sessions[session] = None
        while len(self._sessions) > self._limits.num_sessions:
            self.counts["evicted"] += 1
            oldest = next(iter(self._sessions))
            if oldest.round is not None:
                self._fail(oldest.round, "the session is gone", is_gone=True)
            self._end(oldest)

    def _verify(self, connection: ClientConnection, message: pb.Verify) -> None:
        """Raises BadMessage."""
        session = connection.sessions.get(message.id)
        if session is None:
            gone = pb.Failure(id=message.id, number=message.number, is_gone=True)
            self._send(connection, pb.FromTarget(failure=gone))
            return
        if session.round is not None:
            raise BadMessage(f"session {session.id} has a round already")
        paths = self._checked(session, message)
        session.tokens.extend(message.tokens)
        session.used_s = time.monotonic()
        self._sessions.move_to_end(session)
        if len(message.tokens) > MAX_UNCACHED:
            paths = paths[:1]
        session.round = _Round(session, message.number, paths)
        self.counts["rounds"] += 1
        self.counts["drafted"] += len(message.drafted)
        self._submit(session.round, max(1, message.max_tokens))

    def _checked(self, session: _Session, message: pb.Verify) -> Sequence[tuple[int, ...]]:
        """The draft's paths, an empty one where there is no draft. Raises BadMessage."""
        if len(session.tokens) + len(message.tokens) != message.length:
            raise BadMessage(f"session {session.id} has {len(session.tokens)} tokens")
        if not 0 < message.length <= self._limits.num_tokens:
            raise BadMessage(f"{message.length} tokens; from 1 to {self._limits.num_tokens}")
        if len(message.drafted) > self._limits.num_drafted:
            raise BadMessage(f"{len(message.drafted)} drafted tokens of {self._limits.num_drafted}")
        check_tokens(message.tokens, self._model.vocab_size)
        check_tokens(message.drafted, self._model.vocab_size)
        return paths_of(message.drafted, message.parents, self._limits.num_paths) or ((),)

    # ---- what the engine says

    def _submit(self, current: _Round, max_tokens: int) -> None:
        session = current.session
        prompt = np.asarray(session.tokens, np.int32)
        for number, path in enumerate(current.paths):
            params = replace(session.params, max_tokens=len(path) + 1 if path else max_tokens)
            request = SampleRequest(
                prompt, 1, params, speculate=False, drafted=path,
                # What one client asked cannot be told by another from how long an answer takes.
                cache_salt=str(session.connection.number),
            )  # fmt: skip
            try:
                job = self._engine.submit(request, self._reply(current, number))
            except TinkercloudError as error:
                self._fail(current, str(error))
                self._end(session)
                return
            current.jobs[number] = job

    def _reply(self, current: _Round, number: int) -> Callable[[Output], None]:
        return lambda output: self._returned.append((current, number, output))

    def _compute(self) -> None:
        try:
            self._engine.step()
        except Exception as error:  # each waiting sample gets it; the worker goes on
            logger.exception("a pass failed")
            self._engine.fail_all(error)
        while self._returned:
            current, number, output = self._returned.popleft()
            if current.session.round is current:
                del current.jobs[number]
                self._is_back(current, output)

    def _is_back(self, current: _Round, output: Output) -> None:
        if isinstance(output, BaseException):
            is_ours = isinstance(output, TinkercloudError)
            self._fail(current, str(output) if is_ours else "the pass failed")
            self._end(current.session)
            return
        sequence = output.sequences[0]
        current.num_cached = max(current.num_cached, output.prompt_cache_hit_tokens)
        if current.longest is None or len(sequence.tokens) > len(current.longest.tokens):
            current.longest = sequence
        if not current.jobs:
            self._answer(current, current.longest)

    def _answer(self, current: _Round, sequence: SampledSequence) -> None:
        session = current.session
        session.round = None
        tokens = sequence.tokens.tolist()
        session.tokens.extend(tokens)
        accepted = max(num_equal(path, tokens) for path in current.paths)
        self.counts["accepted"] += accepted
        verdict = pb.Verdict(
            id=session.id,
            number=current.number,
            tokens=tokens,
            logprobs=sequence.logprobs.tolist(),
            num_accepted=accepted,
            has_stopped=sequence.stop_reason == "stop",
            num_cached=current.num_cached,
        )
        self._send(session.connection, pb.FromTarget(verdict=verdict))

    # ---- ends

    def _fail(self, current: _Round, reason: str, *, is_gone: bool = False) -> None:
        """To be followed by the session's end: its tokens are not those that the client has."""
        self.counts["failed"] += 1
        session = current.session
        failure = pb.Failure(id=session.id, number=current.number, reason=reason, is_gone=is_gone)
        self._send(session.connection, pb.FromTarget(failure=failure))

    def _send(self, connection: ClientConnection, message: pb.FromTarget) -> None:
        if not connection.send(message):  # it would wait for ever for what is lost
            self.close(connection)

    def _end(self, session: _Session) -> None:
        if session not in self._sessions:
            return
        current, session.round = session.round, None
        del session.connection.sessions[session.id]
        del self._sessions[session]
        for job in () if current is None else current.jobs.values():
            self._engine.cancel(job)

    def _forget_idle(self) -> None:
        before = self._idle_before()
        if before is None:
            return
        for session in list(self._sessions):
            if session.used_s > before:
                return
            if session.round is None:  # else its client waits for the verdict
                self.counts["expired"] += 1
                self._end(session)
