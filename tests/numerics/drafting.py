"""Ways tests make an engine draft: every round the same number of tokens, by any drafter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tinkercloud.embedded.base_model import BaseModel
from tinkercloud.embedded.blocks import BlockPool
from tinkercloud.embedded.runners import NativeRunner, Runner
from tinkercloud.embedded.speculation import Speculation
from tinkercloud.speculative.drafter import Drafter
from tinkercloud.speculative.guarded_drafter import guarded
from tinkercloud.speculative.rounds import Kind, Load, Reason, Round


@dataclass
class SteadyPolicy:
    """Asks for `most` tokens of every sample in every round, and verifies all that come.
    can_stop: it drafts no more once it is stopped; else that is only noted."""

    most: int
    kind: Kind = Kind.SPECULATIVE
    reason: Reason = Reason.NONE
    rounds: list[Round] = field(default_factory=list)
    is_on: bool = True
    stops: list[Reason] = field(default_factory=list)
    can_stop: bool = False

    def limits(self, loads: Sequence[Load]) -> list[int]:
        return [self.most if self.is_on else 0] * len(loads)

    def choose(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        return [len(own) for own in confidences]

    def learned(self, told: Round) -> None:
        self.rounds.append(told)

    def renew(self) -> None:
        pass

    def stop(self, reason: Reason) -> None:
        self.stops.append(reason)
        self.is_on = self.is_on and not self.can_stop

    @property
    def num_accepted(self) -> int:
        return sum(sum(told.accepted) for told in self.rounds)


class Drafting:
    """What a SamplingEngine takes; remembers the parts it made."""

    def __init__(self, make: Callable[[int], Drafter], most: int, *, can_stop: bool = False):
        self._make, self.policy = make, SteadyPolicy(most, can_stop=can_stop)
        self.speculation: Speculation | None = None

    def __call__(self, base: BaseModel, runner: Runner, pool: BlockPool) -> Speculation:
        vocab_size = base.config.vocab_size
        drafter = guarded(self._make(vocab_size), vocab_size)
        if drafter.layers:
            assert isinstance(runner, NativeRunner)
            runner.capture(base, drafter.layers)
        self.speculation = Speculation(drafter, self.policy)
        return self.speculation
