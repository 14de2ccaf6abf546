"""A smaller model with the target's tokens as drafter.

It draws with the noise that the target will draw with (the coupling of Daliri et al. 2408.07978),
so that its tokens stand nearly as often as any rule could make them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tinkercloud.decoding.sampler import sample
from tinkercloud.embedded.drafting.draft_network import Chain, DraftNetwork, Start
from tinkercloud.embedded.drafting.draft_rows import row_params
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.version import Version
from tinkercloud.speculative.drafters.draft_distribution import (
    AUDIT_EVERY,
    AuditSchedule,
    DraftDistribution,
)
from tinkercloud.speculative.drafters.drafter import NO_DRAFT, Draft, Drafter, Stream


class ModelDrafter(Drafter):
    """The version's weights may be replaced between rounds (`use`)."""

    name = "model"
    is_coupled = True

    def __init__(
        self, version: Version, runner: Runner, pool: BlockPool, audit_every: int = AUDIT_EVERY
    ):
        self._network = DraftNetwork(version, runner, pool)
        self._streams: dict[int, Stream] = {}
        self._audits = AuditSchedule(audit_every)
        self._laws: dict[
            int, list[DraftDistribution]
        ] = {}  # of this call's audited drafts, by sample

    @property
    def version(self) -> Version:
        return self._network.version

    def use(self, version: Version) -> None:
        """Other weights of the same network."""
        self._network.use(version)

    def begin(self, stream: Stream) -> None:
        self._streams[stream.id] = stream
        self._network.begin(stream.id)

    def end(self, stream: Stream) -> None:
        del self._streams[stream.id]
        self._network.end(stream.id)

    @torch.inference_mode()
    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        starts = [Start(stream.id, stream.tokens, most) for stream, most in requests]
        takes = self._audits.takes
        self._laws = {s.id: [] for s, most in requests if most > 0 and takes(s.params.temperature)}
        chains = self._network.go_on(starts, self._drawn)
        return [self._draft(chains.get(stream.id)) for stream, _ in requests]

    def _drawn(self, chains: Sequence[Chain], logits: Tensor) -> tuple[list[int], list[float]]:
        """As the target would, were these its logits."""
        rows = [row_params(self._streams[chain.id], len(chain.tokens)) for chain in chains]
        drawn = sample(logits, rows, self._network.scan)
        for i, chain in enumerate(chains):
            if chain.id in self._laws:
                self._laws[chain.id].append(DraftDistribution.of(drawn.law(i)[0].exp()))
        return drawn.tokens.tolist(), drawn.logprobs.exp().tolist()

    def _draft(self, chain: Chain | None) -> Draft:
        if chain is None:
            return NO_DRAFT
        laws = self._laws.get(chain.id, ())
        return Draft(tuple(chain.tokens), tuple(chain.chances), tuple(laws))
