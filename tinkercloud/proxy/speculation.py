"""Rounds of drafts and verifications until a sample is complete."""

import random
from collections.abc import AsyncGenerator
from contextlib import closing
from dataclasses import dataclass, replace

from tinkercloud.chat.requests import SamplingOptions
from tinkercloud.proxy.drafters import GREEDY, DraftPool
from tinkercloud.proxy.target import MAX_SEED, Target
from tinkercloud.proxy.verification import Round, Sampled

FIRST_DRAFTED = 8
MOST_PLAIN = 16
MISSES = 3


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


class RoundLength:
    """How many tokens the next round drafts: twice as many where all were accepted, else one more
    than were. After MISSES rounds in which none was, or without a draft, the target samples some
    tokens by itself, more and more as long as that goes on."""

    def __init__(self, most: int):
        self._most = most
        self._num_misses = 0
        self.drafted = min(most, FIRST_DRAFTED)
        self.plain = 1

    @property
    def is_plain(self) -> bool:
        return self._num_misses >= MISSES

    def was_plain(self) -> None:
        """A single miss is enough to go on so."""
        self._num_misses = min(self._num_misses, MISSES - 1)
        self.plain = min(2 * self.plain, MOST_PLAIN)

    def was_verified(self, num_drafted: int, num_accepted: int) -> None:
        all_accepted = num_accepted == num_drafted
        self.drafted = min(self._most, 2 * self.drafted if all_accepted else num_accepted + 1)
        if num_accepted:
            self._num_misses, self.plain = 0, 1
        else:
            self._num_misses += 1


class Speculator:
    """most_drafted: tokens of a round."""

    def __init__(self, target: Target, drafters: DraftPool, most_drafted: int):
        self.target = target
        self.drafters = drafters
        self.counts = SpeculationCounts()
        self._most_drafted = most_drafted

    async def pieces(self, task: SampleTask) -> AsyncGenerator[Sampled]:
        """The sample's tokens as they are verified. Closing it ends what is asked of servers.

        Raises UpstreamUnreachable, UpstreamRefused, UpstreamAnswerInvalid of the target."""
        sampling, coins = task.sampling, random.Random(task.sampling.seed)
        if self.target.kind.is_seeded and sampling.seed is None:
            sampling = replace(sampling, seed=coins.randrange(MAX_SEED))
        # Noise that is not keyed by the place tells a drafter nothing.
        draft_sampling = sampling if self.target.kind.is_seeded else GREEDY
        prompt, left = task.prompt, task.max_tokens
        length = RoundLength(self._most_drafted)
        with closing(self.drafters.open()) as sessions:
            while left > 0:
                asked = Round(prompt, (), sampling, min(length.drafted, left - 1))
                drafted: tuple[int, ...] = ()
                if asked.num_tokens > 0 and not length.is_plain:
                    drafted = self._usable(
                        await sessions.draft(replace(asked, sampling=draft_sampling))
                    )
                if drafted:
                    piece = await self._verified(replace(asked, drafted=drafted), length, coins)
                else:
                    piece = await self._plain(
                        replace(asked, num_tokens=min(length.plain, left)), coins
                    )
                    length.was_plain()
                yield piece
                if piece.has_ended:
                    return
                prompt, left = (*prompt, *piece.tokens), left - len(piece.tokens)

    def _usable(self, draft: tuple[int, ...]) -> tuple[int, ...]:
        """Up to a token that may end the sample: whether one does, the target says of its own."""
        num = next((i for i, token in enumerate(draft) if not self.target.is_text(token)), None)
        return draft[:num]

    async def _verified(self, asked: Round, length: RoundLength, coins: random.Random) -> Sampled:
        verified = await self.target.verify(replace(asked, num_tokens=1), coins)
        num_drafted, counts = len(asked.drafted), self.counts
        length.was_verified(num_drafted, verified.num_accepted)
        counts.rounds += 1
        counts.drafted += num_drafted
        counts.accepted += verified.num_accepted
        counts.verified += len(verified.tokens)
        return Sampled(verified.tokens, verified.has_ended)

    async def _plain(self, asked: Round, coins: random.Random) -> Sampled:
        sampled = await self.target.sample(asked, coins)
        self.counts.plain += len(sampled.tokens)
        return sampled
