"""A smaller model with the target's tokens as drafter.

It draws with the noise that the target will draw with (the coupling of Daliri et al. 2408.07978),
so that its tokens are accepted nearly as often as any rule could make them.
"""

from collections.abc import Callable, Sequence
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

    @torch.inference_mode()
    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        takes = self._audits.takes
        self._audited = {
            s.id: [] for s, most in requests if most > 0 and takes(s.params.temperature)
        }
        chains = self._drafted(requests)
        return [self._draft(chains.get(stream.id)) for stream, _ in requests]

    @torch.inference_mode()
    def propose_after(
        self, requests: Sequence[tuple[Stream, Sequence[int], int]], is_stale: Callable[[], bool]
    ) -> list[Draft] | None:
        self._audited = {}
        sources = {stream.id: stream for stream, _, _ in requests}
        was_ended = False

        def is_ended() -> bool:
            nonlocal was_ended
            was_ended = is_stale()
            return was_ended

        branches = self._branches(requests)
        chains = self._drafted(branches, is_ended)
        for branch, most in branches:
            if branch.id not in sources and most:
                self._pool.free(self._caches.pop(branch.id).blocks)
        for stream in sources.values():
            self._changed(stream.id, len(stream.tokens))
        if was_ended:
            return None
        return [self._draft(chains.get(branch.id)) for branch, _ in branches]

    def _branches(
        self, requests: Sequence[tuple[Stream, Sequence[int], int]]
    ) -> list[tuple[Stream, int]]:
        """As requests of streams of their own, with negative ids; but for the first of each stream
        that agrees with all that was read of it, so that this stays for the time that it comes to
        be. Where there is no room for one, of no tokens."""
        branches: list[tuple[Stream, int]] = []
        kept: set[int] = set()
        for i, (stream, after, most) in enumerate(requests):
            tokens, cache = [*stream.tokens, *after], self._caches[stream.id]
            if stream.id not in kept and cache.common(tokens) == len(cache.tokens):
                kept.add(stream.id)
                branches.append((replace(stream, tokens=tokens), most))
                continue
            branch = replace(stream, id=-1 - i, tokens=tokens)
            has_room = most > 0 and self._fork(stream.id, branch.id, tokens)
            branches.append((branch, most if has_room else 0))
        return branches

    def _drafted(
        self, requests: Sequence[tuple[Stream, int]], is_stale: Callable[[], bool] = lambda: False
    ) -> dict[int, Chain]:
        starts = [DraftRequest(s.id, s.tokens, most) for s, most in requests if most > 0]
        self._streams = {stream.id: stream for stream, _ in requests}
        self._seconds = {stream.id: [] for stream, _ in requests} if self._with_seconds else {}
        return self._chains(starts, self._drawn, is_stale)

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
