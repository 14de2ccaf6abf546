"""Verified drafts, and streams of the target's own tokens, until a sample is complete."""

import random
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, closing
from dataclasses import dataclass, replace

from tinkercloud.chat.requests import SamplingOptions
from tinkercloud.proxy.draft_length import DraftLengthController
from tinkercloud.proxy.drafters import GREEDY, DraftPool, DraftSessions, beginning
from tinkercloud.proxy.round_costs import RoundCosts, StreamTimer
from tinkercloud.proxy.target import MAX_SEED, Target
from tinkercloud.proxy.verification import RoundRequest, Sampled
from tinkercloud.speculative.drafters.drafter import Draft

MEASURED = ((56, 1), (168, 32))
"""Tokens of prompts and of drafts that are measured at the start: no whole blocks of a cache, as
hardly any prompt has, and such that its blocks follow from what is found there of both."""
MEASURED_TOKENS = 8
MEASURED_TIMES = 3  # of which the fastest counts: a server that has just begun is slow at first

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


@dataclass(slots=True, eq=False)
class _Sample:
    """tokens: the prompt's, and those that were sampled since. left: that may still be sampled.
    draft: what of it is to be verified next, and whether the target's stream is closed for it.
    has_streamed: whether it was opened before."""

    tokens: tuple[int, ...]
    left: int
    sampling: SamplingOptions
    draft_sampling: SamplingOptions
    coins: random.Random
    length: DraftLengthController
    sessions: DraftSessions
    draft: tuple[int, ...] = ()
    closes_stream: bool = False
    has_ended: bool = False
    has_streamed: bool = False

    @property
    def is_complete(self) -> bool:
        return self.has_ended or self.left <= 0

    def add(self, piece: Sampled) -> None:
        self.tokens = (*self.tokens, *piece.tokens)
        self.left -= len(piece.tokens)
        self.has_ended = piece.has_ended


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

    def _rows(self, num_prompt: int, num_drafted: int) -> int:
        """Tokens that a verification computes."""
        if self.target.kind.computes_prompt:
            return num_prompt + num_drafted
        block = self.target.block
        return self._opened_rows(num_prompt) + num_drafted if block else num_drafted + 1

    def _opened_rows(self, num_prompt: int) -> int:
        """Tokens that opening a stream computes, of a prompt behind a verification: those behind
        its last whole block. Any of them, where that is not known."""
        block = self.target.block
        # The last token was sampled, but is not computed: no block that it would end is cached.
        return (num_prompt - 1) % block + 1 if block else num_prompt

    async def measure(self, prompt: tuple[int, ...]) -> None:
        """What the target's requests take, so that no sample has to find out, of a prompt that it
        has in its cache, as between the rounds of a sample. prompt: of any content. Raises as
        `pieces`."""
        coins, requests = random.Random(0), list[RoundRequest]()
        for num_prompt, num_drafted in MEASURED:
            tokens = (prompt * (num_prompt // len(prompt) + 2))[: num_prompt + num_drafted]
            requests.append(RoundRequest(tokens[:num_prompt], tokens[num_prompt:], GREEDY))
            await self.target.sample(replace(requests[-1], drafted=()), coins)
            await self.target.verify(requests[-1], coins)
        for request in requests:
            num_prompt = len(request.prompt)
            num_drafted = self.target.room(num_prompt, len(request.drafted))
            streamed = replace(request, drafted=(), num_tokens=MEASURED_TOKENS)
            opened, rest = zip(
                *[await self._timed_stream(streamed, coins) for _ in range(MEASURED_TIMES)],
                strict=True,
            )
            (rest_s, num_rest), (opened_s, num_first) = min(rest), min(opened)
            if num_rest:
                self.costs.was_streamed(num_rest, rest_s)
            rows = self._opened_rows(num_prompt)
            self.costs.was_opened(num_first, opened_s, rows, is_reopened=True)
            request = replace(request, drafted=request.drafted[:num_drafted])
            rows, times_s = self._rows(num_prompt, num_drafted), list[float]()
            for _ in range(MEASURED_TIMES):
                began = self._clock()
                await self.target.verify(request, coins)
                times_s.append(self._clock() - began)
            self.costs.was_verified(rows, min(times_s), closes_stream=False)

    async def _timed_stream(
        self, request: RoundRequest, coins: random.Random
    ) -> tuple[tuple[float, int], tuple[float, int]]:
        """Seconds until the first tokens, and how many they were; those of all others."""
        began, times, nums = self._clock(), list[float](), list[int]()
        async with aclosing(self.target.stream(request, coins)) as pieces:
            async for piece in pieces:
                times.append(self._clock() - began)
                nums.append(len(piece.tokens))
        return (times[0], nums[0]), (times[-1] - times[0], sum(nums[1:]))

    def _timer(self, num_prompt: int, *, is_reopened: bool) -> StreamTimer:
        rows = self._opened_rows(num_prompt)
        return StreamTimer(self.costs, self._clock, rows, is_reopened=is_reopened)

    async def pieces(self, task: SampleTask) -> AsyncGenerator[Sampled]:
        """The sample's tokens as they are verified or streamed. Closing it ends what is asked of
        servers.

        Raises UpstreamUnreachable, UpstreamRefused, UpstreamAnswerInvalid of the target."""
        with closing(self.drafters.open()) as sessions:
            sample = self._begun(task, sessions)
            while not sample.is_complete:
                await self._draft(sample, is_streaming=False)
                if not sample.draft:
                    async with aclosing(self._sampled(sample)) as pieces:
                        async for piece in pieces:
                            yield piece
                if sample.draft:
                    yield await self._verified(sample)

    def _begun(self, task: SampleTask, sessions: DraftSessions) -> _Sample:
        sampling, coins = task.sampling, random.Random(task.sampling.seed)
        kind = self.target.kind
        if kind.is_seeded and sampling.seed is None:
            sampling = replace(sampling, seed=coins.randrange(MAX_SEED))
        # Noise that is not keyed by the place tells a drafter nothing.
        draft_sampling = sampling if kind.is_seeded else GREEDY
        length = DraftLengthController(
            self._most_drafted, self.costs, self._rows, self._opened_rows
        )
        return _Sample(
            task.prompt, task.max_tokens, sampling, draft_sampling, coins, length, sessions
        )

    # ---- drafts

    async def _draft(self, sample: _Sample, *, is_streaming: bool) -> None:
        """Sets what is to be verified next; () where the target is to sample."""
        sample.draft, sample.closes_stream, num_tokens = (), is_streaming, len(sample.tokens)
        num = sample.length.asked(num_tokens, sample.left, is_streaming=is_streaming)
        if not num:
            return
        began = self._clock()
        request = RoundRequest(sample.tokens, (), sample.draft_sampling, num)
        draft = self._usable(await sample.sessions.draft(request))
        self.costs.drafted.add(num, self._clock() - began)
        sample.length.was_drafted(draft)
        room = self.target.room(num_tokens, len(draft.tokens))
        num = sample.length.verified(num_tokens, room, is_streaming=is_streaming)
        sample.draft = draft.tokens[:num]

    def _usable(self, draft: Draft) -> Draft:
        """Up to a token that may end the sample: whether one does, the target says of its own."""
        is_text = self.target.is_text
        ends = (place for place, token in enumerate(draft.tokens) if not is_text(token))
        return beginning(draft, next(ends, len(draft.tokens)))

    async def _verified(self, sample: _Sample) -> Sampled:
        num_drafted, counts = len(sample.draft), self.counts
        request = RoundRequest(sample.tokens, sample.draft, sample.sampling)
        began, rows = self._clock(), self._rows(len(sample.tokens), num_drafted)
        verified = await self.target.verify(request, sample.coins)
        duration_s = self._clock() - began
        self.costs.was_verified(
            rows,
            duration_s,
            closes_stream=sample.closes_stream,
            num_requests=verified.num_requests,
        )
        if verified.is_sampled:
            sample.length.was_sampled(verified.tokens)
            counts.plain += len(verified.tokens)
        else:
            sample.length.was_verified(num_drafted, verified.num_accepted)
            counts.rounds += 1
            counts.drafted += num_drafted
            counts.accepted += verified.num_accepted
            counts.verified += len(verified.tokens)
        piece = Sampled(verified.tokens, verified.has_ended)
        sample.add(piece)
        return piece

    # ---- the target's own

    async def _sampled(self, sample: _Sample) -> AsyncGenerator[Sampled]:
        """Up to the sample's end, or to where a draft is to be verified. What is given out is all
        that was seen of the stream, so that where it is left does not depend on what is thrown
        away, and a sample drawn by chance keeps its distribution."""
        request = RoundRequest(sample.tokens, (), sample.sampling, sample.left)
        timer = self._timer(len(sample.tokens), is_reopened=sample.has_streamed)
        sample.has_streamed = True
        async with aclosing(self.target.stream(request, sample.coins)) as pieces:
            async for piece in pieces:
                timer.add(len(piece.tokens))
                self.counts.plain += len(piece.tokens)
                sample.length.was_sampled(piece.tokens)
                sample.add(piece)
                yield piece
                timer.resume()
                if not sample.is_complete:
                    await self._draft(sample, is_streaming=True)
                if sample.draft:
                    return
