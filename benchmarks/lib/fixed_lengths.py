"""Drafts of one length in every round: what a controller of the length is compared with."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tinkercloud.commands.bench import AcceptanceSummary, EngineFactory
from tinkercloud.embedded.drafting.compiled_suffix import suffix_drafter
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.sampling.base_states import Speculate
from tinkercloud.embedded.sampling.speculation import Speculation
from tinkercloud.speculative.draft_length.costs import CostTable
from tinkercloud.speculative.draft_length.fixed_length import FixedLength
from tinkercloud.speculative.drafters.guarded_drafter import GuardedDrafter

LENGTHS = (1, 2, 4, 8)


def fixed(engines: EngineFactory) -> dict[int, EngineFactory]:
    """With the suffix drafter, each with one of LENGTHS."""
    return {length: replace(engines, speculate=_speculate(length)) for length in LENGTHS}


def _speculate(length: int) -> Speculate:
    def make(base: BaseModel, runner: Runner, pool: BlockPool) -> Speculation:
        guard = GuardedDrafter(suffix_drafter(base), base.config.vocab_size)
        return Speculation(guard, FixedLength(length))

    return make


@dataclass(frozen=True)
class Hindsight:
    """What the lengths came to, each in every round of a load. times: tokens/s over plain's, by
    length. acceptance: likewise."""

    times: Mapping[int, float]
    acceptance: Mapping[int, AcceptanceSummary]

    @property
    def best(self) -> tuple[int, float]:
        """The length, 0 for none, and its times plain."""
        return max([(0, 1.0), *self.times.items()], key=lambda pair: pair[1])

    def bound(self, costs: CostTable, sequences: int, context: float) -> float:
        """The most times plain, if a round of all the sequences took what the table says: as if
        drafting and the rest of a round took no time, and all ended together."""
        plain_ms, times = costs.plain_ms(sequences, context), 1.0
        for seen in self.acceptance.values():
            verify_ms = float(
                costs.verify_ms(np.array([sequences * seen.rows]), sequences, context)[0]
            )
            times = max(times, seen.per_pass * plain_ms / verify_ms)
        return times
