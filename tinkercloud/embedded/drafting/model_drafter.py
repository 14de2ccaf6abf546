"""A smaller model with the target's tokens as drafter.

It draws with the noise that the target will draw with (the coupling of Daliri et al. 2408.07978),
so that its tokens are accepted nearly as often as any rule could make them.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tinkercloud.decoding.sampler import sample
from tinkercloud.embedded.drafting.network_drafter import (
    Chain,
    DraftRequest,
    NetworkDrafter,
    row_params,
)
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.version import Version
from tinkercloud.speculative.drafters.draft_distribution import (
    AUDIT_EVERY,
    AuditSchedule,
    DraftDistribution,
)
from tinkercloud.speculative.drafters.drafter import NO_DRAFT, Draft, Stream

NEVER = -1e30  # a logit


class ModelDrafter(NetworkDrafter):
    """with_seconds: its drafts have `seconds`, for which each token is drawn twice."""

    is_coupled = True

    def __init__(
        self, version: Version, runner: Runner, pool: BlockPool, audit_every: int = AUDIT_EVERY,
        *, with_seconds: bool = False,
    ):  # fmt: skip
        super().__init__(version, runner, pool)
        self._with_seconds = with_seconds
        self._seconds: dict[int, list[int]] = {}  # of this call, by sample
        self._audits = AuditSchedule(audit_every)
        self._streams: dict[int, Stream] = {}  # of this call of `propose`
        # Of its audited drafts, by sample: what each token was drawn from.
        self._audited: dict[int, list[DraftDistribution]] = {}

    @torch.inference_mode()
    def catch_up(self, streams: Sequence[Stream]) -> None:
        self._read_ahead([DraftRequest(stream.id, stream.tokens, 1) for stream in streams])

    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        self._seconds = {stream.id: [] for stream, _ in requests} if self._with_seconds else {}
        return self._proposed(requests)

    @torch.inference_mode()
    def _proposed(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        starts = [DraftRequest(stream.id, stream.tokens, most) for stream, most in requests]
        takes = self._audits.takes
        self._streams = {stream.id: stream for stream, _ in requests}
        self._audited = {
            s.id: [] for s, most in requests if most > 0 and takes(s.params.temperature)
        }
        chains = self._chains(starts, self._drawn)
        return [self._draft(chains.get(stream.id)) for stream, _ in requests]

    def propose_after(self, requests: Sequence[tuple[Stream, Sequence[int], int]]) -> list[Draft]:
        """Without `seconds`: nobody asks what comes after what is itself a guess."""
        self._seconds = {}
        drafts = self._proposed(
            [(replace(s, tokens=[*s.tokens, *after]), most) for s, after, most in requests]
        )
        for stream, _, _ in requests:
            self._changed(stream.id, len(stream.tokens))
        return drafts

    def _drawn(self, chains: Sequence[Chain], logits: Tensor) -> tuple[list[int], list[float]]:
        """As the target would, were these its logits."""
        rows = [row_params(self._streams[chain.id], len(chain.tokens)) for chain in chains]
        drawn = sample(logits, rows, self.scan)
        for i, chain in enumerate(chains):
            if chain.id in self._audited:
                self._audited[chain.id].append(DraftDistribution.of(drawn.distribution(i)[0].exp()))
        if self._seconds:
            others = logits.scatter(1, drawn.tokens[:, None].to(logits.device), NEVER)
            for chain, second in zip(chains, sample(others, rows).tokens.tolist(), strict=True):
                self._seconds[chain.id].append(second)
        return drawn.tokens.tolist(), drawn.logprobs.exp().tolist()

    def _draft(self, chain: Chain | None) -> Draft:
        if chain is None:
            return NO_DRAFT
        audited = self._audited.get(chain.id, ())
        seconds = tuple(self._seconds.get(chain.id, ()))
        return Draft(tuple(chain.tokens), tuple(chain.probs), tuple(audited), seconds)
