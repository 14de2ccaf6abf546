"""What a draft worker knows of the engines that it drafts for."""

from dataclasses import dataclass, field
from queue import Full, Queue

from tinkercloud.speculative.drafters.drafter import Drafter, Stream
from tinkercloud.speculative.remote import draft_pb2 as pb
from tinkercloud.speculative.remote.learned_weights import IncomingWeights
from tinkercloud.speculative.remote.messages import Target
from tinkercloud.speculative.remote.outcomes import Calibration, Outlook

MAX_WAITING = 64  # answers that an engine has not read; more are dropped: they would be late


@dataclass(slots=True, eq=False)
class Sample:
    """id: at the engine. round: in which it was asked for last."""

    connection: "Connection"
    id: int
    stream: Stream
    used_s: float
    round: int = 0
    outlook: Outlook | None = None


@dataclass(eq=False)
class Connection:
    """An engine. outgoing: what it is to be sent, and None at the end. has_learned: the drafter has
    the engine's own weights, and drafts for it alone."""

    number: int
    target: Target | None = None
    drafter: Drafter | None = None
    samples: dict[int, Sample] = field(default_factory=dict)
    calibration: Calibration = field(default_factory=Calibration)
    weights: IncomingWeights = field(default_factory=IncomingWeights)
    has_learned: bool = False
    outgoing: "Queue[pb.ToEngine | None]" = field(default_factory=lambda: Queue(MAX_WAITING))

    def send(self, message: pb.ToEngine) -> bool:
        try:
            self.outgoing.put_nowait(message)
        except Full:
            return False
        return True

    def send_end(self) -> bool:
        """Also where the queue is full: what is in it has no reader any more. False where the end
        was there already."""
        while True:
            try:
                self.outgoing.put_nowait(None)
                return True
            except Full:
                if self.outgoing.get_nowait() is None:
                    return False
