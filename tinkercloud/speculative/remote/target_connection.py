"""A client's connection to a target worker, which can be made again."""

import threading
import time
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import grpc

from tinkercloud.addresses import Address
from tinkercloud.core.types import SamplingParams
from tinkercloud.errors import UserError
from tinkercloud.speculative.remote import target_pb2 as pb
from tinkercloud.speculative.remote.connection import ClientSecurity
from tinkercloud.speculative.remote.link import reason_of
from tinkercloud.speculative.remote.messages import BadMessage, wire_params
from tinkercloud.speculative.remote.methods import VERIFY
from tinkercloud.speculative.remote.target_messages import PROTOCOL, TargetModel

POLL_S = 0.05  # after which a waiting call looks whether it is to stop
PAUSE_S = 0.5  # between attempts to connect


class TargetGone(UserError):
    """The target worker does not answer, or has closed the connection."""


class SessionGone(UserError):
    """The worker has forgotten the session."""


class Stopped(Exception):
    """The caller does not want the answer any more."""


Answers = SimpleQueue[pb.FromTarget | TargetGone]


@dataclass(slots=True, eq=False)
class TargetStream:
    """One gRPC call. waiting: by session, where its answers go; 0: the welcome. end: why there are
    no more."""

    channel: grpc.Channel
    call: Any
    outgoing: SimpleQueue[pb.ToTarget | None]
    waiting: dict[int, Answers] = field(default_factory=dict[int, Answers])
    end: TargetGone | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, number: int) -> Answers:
        """Raises TargetGone."""
        with self.lock:
            if self.end is not None:
                raise self.end
            answers = self.waiting[number] = Answers()
            return answers

    def finish(self, end: TargetGone) -> None:
        with self.lock:
            self.end = end
            for answers in self.waiting.values():
                answers.put(end)


class TargetConnection:
    """Its methods may be called from several threads. timeout_s: for an answer."""

    def __init__(self, address: Address, security: ClientSecurity, timeout_s: float):
        self.address = address
        self._security, self._timeout_s = security, timeout_s
        self._lock = threading.Lock()
        self._stream: TargetStream | None = None
        self._model: TargetModel | None = None
        self._next_id = 1

    @property
    def model(self) -> TargetModel:
        """Of a connection that was made once."""
        assert self._model is not None, "not connected"
        return self._model

    def connect(self, patience_s: float = 0.0) -> None:
        """Nothing where it is connected. patience_s: for how long it is tried. Raises TargetGone,
        ConfigError where a key or certificate cannot be read."""
        deadline_s = time.monotonic() + patience_s
        with self._lock:
            while self._stream is None or self._stream.end is not None:
                self._drop()
                try:
                    self._connect()
                except TargetGone:
                    self._drop()
                    if time.monotonic() + PAUSE_S > deadline_s:
                        raise
                    time.sleep(PAUSE_S)

    def open(self, params: SamplingParams) -> tuple[int, TargetStream]:
        """A session: its id, and the stream that it lives on. Raises TargetGone."""
        with self._lock:
            stream = self._stream
            if stream is None:
                raise TargetGone("not connected")
            number, self._next_id = self._next_id, self._next_id + 1
            stream.add(number)
        stream.outgoing.put(pb.ToTarget(open=pb.Open(id=number, params=wire_params(params))))
        return number, stream

    def verify(self, stream: TargetStream, message: pb.Verify, stop: threading.Event) -> pb.Verdict:
        """stream: of the session. Raises TargetGone, SessionGone, Stopped, UserError with the
        worker's reason."""
        answers = stream.waiting[message.id]
        stream.outgoing.put(pb.ToTarget(verify=message))
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                answer = answers.get(timeout=POLL_S)
            except Empty:
                if stop.is_set():
                    raise Stopped from None
                if time.monotonic() > deadline_s:
                    raise TargetGone(
                        f"{self.address}: no answer for {self._timeout_s:g} s"
                    ) from None
                continue
            if isinstance(answer, TargetGone):
                raise answer
            if answer.HasField("failure"):
                if answer.failure.is_gone:
                    raise SessionGone("the target has forgotten the session")
                raise UserError(f"{self.address}: {answer.failure.reason}")
            if answer.verdict.number == message.number:
                return answer.verdict

    def end(self, number: int, stream: TargetStream) -> None:
        """Of a session, whatever it is doing. Never raises."""
        with stream.lock:
            stream.waiting.pop(number, None)
        if stream.end is None:
            stream.outgoing.put(pb.ToTarget(end=pb.End(id=number)))

    def close(self) -> None:
        """Can be called again; sessions that are left end at the worker too."""
        with self._lock:
            self._drop()

    # ----

    def _connect(self) -> None:
        """Raises TargetGone, ConfigError."""
        channel = self._security.channel(self.address)
        outgoing: SimpleQueue[pb.ToTarget | None] = SimpleQueue()
        hello = pb.Hello(protocol=PROTOCOL, needs_tokenizer=self._model is None)
        outgoing.put(pb.ToTarget(hello=hello))
        call = VERIFY.call(channel, iter(outgoing.get, None), self._security.metadata())
        stream = self._stream = TargetStream(channel, call, outgoing)
        welcome = stream.add(0)
        reader = threading.Thread(
            target=self._read, args=(stream,), name=f"target {self.address}", daemon=True
        )
        reader.start()
        try:
            answer = welcome.get(timeout=self._timeout_s)
        except Empty:
            raise TargetGone(f"{self.address} does not answer") from None
        if isinstance(answer, TargetGone):
            raise answer
        try:
            model = TargetModel.of(answer.welcome)
        except BadMessage as error:
            raise TargetGone(f"{self.address}: {error}") from None
        if self._model is None:
            self._model = model
        elif model.digest != self._model.digest:
            raise UserError(f"{self.address} has another model than before: {model.name}")

    def _read(self, stream: TargetStream) -> None:
        end = TargetGone(f"{self.address} has closed the connection")
        try:
            for message in stream.call:
                if message.HasField("refusal"):
                    end = TargetGone(f"{self.address} refuses: {message.refusal.reason[:500]}")
                    break
                answers = stream.waiting.get(_session_of(message))
                if answers is not None:
                    answers.put(message)
        except grpc.RpcError as error:
            end = TargetGone(f"{self.address}: {reason_of(error)}")
        stream.finish(end)

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.outgoing.put(None)  # ends the thread that sends
            stream.call.cancel()
            stream.channel.close()


def _session_of(message: pb.FromTarget) -> int:
    """0: for the one who connects."""
    if message.HasField("verdict"):
        return message.verdict.id
    return message.failure.id if message.HasField("failure") else 0
