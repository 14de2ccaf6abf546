"""Rounds of drafts and verifications until a sample is complete."""

import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from tinkercloud.chat.requests import SamplingOptions
from tinkercloud.proxy.drafters import GREEDY, DraftPool, DraftSessions
from tinkercloud.proxy.round_costs import RoundCosts
from tinkercloud.proxy.round_length import RoundLength
from tinkercloud.proxy.target import MAX_SEED, Target
from tinkercloud.proxy.verification import RoundRequest, Sampled

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class SampleTask:
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingOptions


@dataclass(slots=True)
class SpeculationCounts:
    """Since the start. plain: tokens that the target sampled without a draft."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    verified: int = 0
    plain: int = 0


class Speculator:
    """most_drafted: tokens of a round. clock: in seconds."""

    def __init__(
        self,
        target: Target,
        drafters: DraftPool,
        most_drafted: int,
        clock: Clock = time.perf_counter,
    ):
        self.target = target
        self.drafters = drafters
        self.counts = SpeculationCounts()
        self.costs = RoundCosts()
        self._most_drafted = most_drafted
        self._clock = clock

    async def pieces(self, task: SampleTask) -> AsyncGenerator[Sampled]:
        """The sample's tokens as they are verified. Closing it ends what is asked of servers.

        Raises UpstreamUnreachable, UpstreamRefused, UpstreamAnswerInvalid of the target."""
        sampling, coins = task.sampling, random.Random(task.sampling.seed)
        if self.target.kind.is_seeded and sampling.seed is None:
            sampling = replace(sampling, seed=coins.randrange(MAX_SEED))
        # Noise that is not keyed by the place tells a drafter nothing.
        draft_sampling = sampling if self.target.kind.is_seeded else GREEDY
        prompt, left = task.prompt, task.max_tokens
        length = RoundLength(
            self._most_drafted, self.costs, computes_prompt=self.target.kind.computes_prompt
        )
        with closing(self.drafters.open()) as sessions:
            while left > 0:
                num = min(length.drafted(len(prompt)), left - 1)
                request = RoundRequest(prompt, (), draft_sampling, num)
                drafted: tuple[int, ...] = ()
                if num > 0 and not length.is_plain:
                    drafted = await self._drafted(request, sessions)
                request = RoundRequest(prompt, drafted, sampling)
                if drafted and length.pays(len(prompt), len(drafted)):
                    piece = await self._verified(request, length, coins)
                else:
                    request = RoundRequest(prompt, (), sampling, min(length.plain, left))
                    piece = await self._plain(request, coins)
                    num_compared = min(len(drafted), len(piece.tokens))
                    length.was_plain(num_compared, _num_equal(drafted, piece.tokens))
                yield piece
                if piece.has_ended:
                    return
                prompt, left = (*prompt, *piece.tokens), left - len(piece.tokens)

    async def _drafted(self, request: RoundRequest, sessions: DraftSessions) -> tuple[int, ...]:
        began = self._clock()
        draft = await sessions.draft(request)
        self.costs.drafted.add(request.num_tokens, self._clock() - began)
        return self._usable(draft)

    def _usable(self, draft: tuple[int, ...]) -> tuple[int, ...]:
        """Up to a token that may end the sample: whether one does, the target says of its own."""
        num = next((i for i, token in enumerate(draft) if not self.target.is_text(token)), None)
        return draft[:num]

    async def _verified(
        self, request: RoundRequest, length: RoundLength, coins: random.Random
    ) -> Sampled:
        began, num_drafted, counts = self._clock(), len(request.drafted), self.counts
        verified = await self.target.verify(request, coins)
        rows = length.rows(len(request.prompt), num_drafted)
        self.costs.verified.add(rows, self._clock() - began)
        length.was_verified(num_drafted, verified.num_accepted)
        counts.rounds += 1
        counts.drafted += num_drafted
        counts.accepted += verified.num_accepted
        counts.verified += len(verified.tokens)
        return Sampled(verified.tokens, verified.has_ended)

    async def _plain(self, request: RoundRequest, coins: random.Random) -> Sampled:
        began = self._clock()
        sampled = await self.target.sample(request, coins)
        self.costs.plain.add(len(sampled.tokens), self._clock() - began)
        self.counts.plain += len(sampled.tokens)
        return sampled


def _num_equal(drafted: Sequence[int], tokens: Sequence[int]) -> int:
    """How many they begin with in common."""
    pairs = enumerate(zip(drafted, tokens, strict=False))
    shorter = min(len(drafted), len(tokens))
    return next((place for place, (first, second) in pairs if first != second), shorter)
