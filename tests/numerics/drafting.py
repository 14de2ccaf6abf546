"""Ways tests make an engine draft: every round the same number of tokens, by any drafter."""

from collections.abc import Callable, Collection

from tinkercloud.embedded.base_model import BaseModel
from tinkercloud.embedded.blocks import BlockPool
from tinkercloud.embedded.runners import Runner
from tinkercloud.embedded.speculation import Speculation
from tinkercloud.speculative.draft_vocabulary import DraftVocabulary
from tinkercloud.speculative.drafter import Drafter
from tinkercloud.speculative.guarded_drafter import guarded
from tinkercloud.speculative.head import FrozenRows, Head, HeadConfig, Params, fresh_params
from tinkercloud.speculative.rounds import Reason, Round
from tinkercloud.speculative.steady import Steady


class Watched(Steady):
    """Remembers the rounds that it is told of, and why it should have stopped."""

    def __init__(self, most: int):
        super().__init__(most)
        self.rounds: list[Round] = []
        self.stops: list[Reason] = []

    def learned(self, told: Round) -> None:
        self.rounds.append(told)

    def stop(self, reason: Reason) -> None:
        self.stops.append(reason)

    @property
    def num_accepted(self) -> int:
        return sum(sum(told.accepted) for told in self.rounds)


class Drafting:
    """What a SamplingEngine takes; remembers the parts it made."""

    def __init__(self, make: Callable[[int], Drafter], most: int):
        self._make, self.policy = make, Watched(most)
        self.speculation: Speculation | None = None

    def __call__(self, base: BaseModel, runner: Runner, pool: BlockPool) -> Speculation:
        vocab_size = base.config.vocab_size
        drafter = guarded(self._make(vocab_size), vocab_size)
        if drafter.layers:
            runner.capture(base, drafter.layers)
        self.speculation = Speculation(drafter, self.policy)
        return self.speculation


def untaught_head(base: BaseModel, says: Collection[int] | None = None) -> tuple[Head, Params]:
    """One that knows nothing. says: the tokens that it can draft, or None for all."""
    size = base.config.vocab_size
    vocabulary = DraftVocabulary.of(range(size) if says is None else says, size)
    config = HeadConfig.of(base.config)
    return Head(config, FrozenRows.of(base.weights, vocabulary)), fresh_params(config, 0)
