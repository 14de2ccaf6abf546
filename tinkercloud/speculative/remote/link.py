"""An engine's connection to one draft worker, which comes back by itself."""

import logging
import threading
from contextlib import suppress
from queue import Full, Queue
from typing import Protocol

import grpc

from tinkercloud.addresses import Address
from tinkercloud.speculative.remote import draft_pb2 as pb
from tinkercloud.speculative.remote.connection import ClientSecurity
from tinkercloud.speculative.remote.messages import Target
from tinkercloud.speculative.remote.methods import DRAFT

logger = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
MAX_UNSENT = 64  # messages; a worker that reads slower than that is as good as dead


class LinkUser(Protocol):
    """Is called from the link's thread."""

    def opened(self, link: "Link") -> None: ...

    def received(self, link: "Link", drafts: pb.Drafts) -> None: ...

    def closed(self, link: "Link") -> None: ...


class Link(Protocol):
    name: str

    def start(self, user: LinkUser) -> None: ...

    def send(self, message: pb.Round) -> bool:
        """False where it cannot be sent; never waits."""
        ...

    def push(self, message: pb.Weights) -> bool:
        """As `send`."""
        ...

    def drop(self, reason: str) -> None:
        """Ends this connection; another is tried later."""
        ...

    def close(self) -> None: ...


class GrpcLink:
    """Waits longer after each failure, up to LONGEST_WAIT_S; a worker that was welcome is asked
    again soon."""

    def __init__(self, address: Address, security: ClientSecurity, target: Target):
        self.name = str(address)
        self._address, self._security, self._target = address, security, target
        self._outgoing: Queue[pb.ToWorker | None] = Queue(MAX_UNSENT)
        self._call: grpc.Call | None = None
        self._ending = threading.Event()
        self._logged_reason = ""  # the last one

    def start(self, user: LinkUser) -> None:
        threading.Thread(
            target=self._run, args=(user,), name=f"drafts {self.name}", daemon=True
        ).start()

    def send(self, message: pb.Round) -> bool:
        return self._put(pb.ToWorker(round=message))

    def push(self, message: pb.Weights) -> bool:
        return self._put(pb.ToWorker(weights=message))

    def _put(self, message: pb.ToWorker) -> bool:
        try:
            self._outgoing.put_nowait(message)
        except Full:
            return False
        return True

    def drop(self, reason: str) -> None:
        self._complain(reason)
        call = self._call
        if call is not None:
            call.cancel()

    def close(self) -> None:
        self._ending.set()
        self.drop("")

    def _run(self, user: LinkUser) -> None:
        wait_s = FIRST_WAIT_S
        while not self._ending.is_set():
            try:
                was_open = self._connect(user)
            except grpc.RpcError as error:
                was_open = False
                self._complain(reason_of(error))
            wait_s = FIRST_WAIT_S if was_open else min(2 * wait_s, LONGEST_WAIT_S)
            self._ending.wait(wait_s)

    def _connect(self, user: LinkUser) -> bool:
        """Until the connection ends; whether the worker welcomed the engine."""
        self._outgoing = outgoing = Queue[pb.ToWorker | None](MAX_UNSENT)
        outgoing.put(self._target.hello())
        was_open = False
        with self._security.channel(self._address) as channel:
            metadata = self._security.metadata()
            call = self._call = DRAFT.call(channel, iter(outgoing.get, None), metadata)
            try:
                for message in call:
                    if message.HasField("drafts"):
                        user.received(self, message.drafts)
                    elif message.HasField("refusal"):
                        self._complain(f"it refuses: {message.refusal.reason[:500]}")
                        break
                    elif message.welcome.needs_tokenizer and not was_open:
                        outgoing.put(self._target.hello(with_tokenizer=True))
                    elif not was_open:
                        was_open, self._logged_reason = True, ""
                        logger.info("drafts come from %s", self.name)
                        user.opened(self)
            except grpc.RpcError as error:
                if not was_open:
                    raise
                self._complain(reason_of(error))
            finally:
                self._call = None
                call.cancel()
                with suppress(Full):
                    outgoing.put_nowait(None)  # ends the thread that sends
                if was_open:
                    user.closed(self)
        return was_open

    def _complain(self, reason: str) -> None:
        """Once, not at every try."""
        if reason and reason != self._logged_reason and not self._ending.is_set():
            self._logged_reason = reason
            logger.warning("no drafts from %s: %s; it is tried again", self.name, reason)


def reason_of(error: grpc.RpcError) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name.lower()}: {error.details() or ''}".strip(": ")
    return str(error)
