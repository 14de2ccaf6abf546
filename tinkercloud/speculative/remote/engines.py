"""What a draft worker knows of the engines that it drafts for."""

from dataclasses import dataclass, field

from tinkercloud.speculative.drafters.drafter import Drafter, Stream
from tinkercloud.speculative.remote.learned_weights import IncomingWeights
from tinkercloud.speculative.remote.messages import Target
from tinkercloud.speculative.remote.outcomes import Calibration, Outlook
from tinkercloud.speculative.remote.stream_worker import Connection


@dataclass(slots=True, eq=False)
class Sample:
    """id: at the engine. round: in which it was asked for last."""

    connection: "EngineConnection"
    id: int
    stream: Stream
    used_s: float
    round: int = 0
    outlook: Outlook | None = None


@dataclass(eq=False)
class EngineConnection(Connection):
    """has_learned: the drafter has the engine's own weights, and drafts for it alone."""

    target: Target | None = None
    drafter: Drafter | None = None
    samples: dict[int, Sample] = field(default_factory=dict)
    calibration: Calibration = field(default_factory=Calibration)
    weights: IncomingWeights = field(default_factory=IncomingWeights)
    has_learned: bool = False
