"""The target: the server whose samples the proxy's are."""

import math
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from tinkercloud.chat.requests import SamplingOptions
from tinkercloud.errors import UpstreamAnswerInvalid, UpstreamRefused
from tinkercloud.proxy.answers import event_json
from tinkercloud.proxy.server_kinds import ScoreForm, ServerKind, VerifyForm
from tinkercloud.proxy.upstream import Upstream
from tinkercloud.proxy.verification import (
    RoundRequest,
    Sampled,
    Scores,
    Verified,
    verify_by_chance,
    verify_greedily,
)

MAX_REDRAWS = 1000
MAX_SEED = 2**31
TRIES = 2
"""Of a verification by the cache, before the target samples a token itself: to have the whole
prompt scored takes as long as a stream's tokens for a short one, and seconds for a long one."""


class Target:
    """is_text: of a token, whether it has text and cannot end a sample. block: tokens by which its
    cache keeps prompts, as far as it has told; 0: it has not."""

    def __init__(self, upstream: Upstream, kind: ServerKind, is_text: Callable[[int], bool]):
        self.upstream = upstream
        self.kind = kind
        self.is_text = is_text
        self.block = 0

    def takes(self, sampling: SamplingOptions) -> bool:
        """Whether samples with these options can be verified. What other servers than ours report
        are log-probabilities at temperature 1 and of the whole vocabulary."""
        if self.kind.is_seeded or sampling.temperature == 0:
            return True
        whole = sampling.top_p == 1 and sampling.top_k <= 0 and sampling.min_p == 0
        return whole and sampling.temperature == 1

    async def sample(self, request: RoundRequest, coins: random.Random) -> Sampled:
        form = self.kind.sample
        request = replace(request, sampling=self._seeded(request.sampling, coins))
        return form.read(request, await self.upstream.post(form.path, form.request(request)))

    async def stream(self, request: RoundRequest, coins: random.Random) -> AsyncGenerator[Sampled]:
        """Its own tokens as they come, none of the pieces empty. Closing it ends the request. A
        token that may end the sample waits for the next event: ours say only there whether it does.

        Raises UpstreamUnreachable, UpstreamRefused, UpstreamAnswerInvalid."""
        form = self.kind.sample
        request = replace(request, sampling=self._seeded(request.sampling, coins))
        num, held = 0, tuple[int, ...]()
        body = form.request(request) | {"stream": True}
        async with aclosing(self.upstream.events(form.path, body)) as events:
            async for event in events:
                if (answer := event_json(event)) is None:
                    continue
                piece = form.read_event(request, answer, num)
                num, held = num + len(piece.tokens), (*held, *piece.tokens)
                if held and (piece.has_ended or not piece.tokens or self.is_text(held[-1])):
                    yield Sampled(held, piece.has_ended)
                    if piece.has_ended or num == request.num_tokens:
                        return
                    held = ()
        if num < request.num_tokens:
            raise UpstreamAnswerInvalid(f"the stream of {self.upstream.name} broke off")
        if held:
            yield Sampled(held, has_ended=False)

    async def verify(self, request: RoundRequest, coins: random.Random) -> Verified:
        """The accepted tokens, and one of the target's own."""
        verified = await self._verify(request, coins)
        if verified.has_ended or len(verified.tokens) > verified.num_accepted:
            return verified
        redrawn = await self._redrawn(request, verified, coins)
        return replace(
            verified, tokens=(*verified.tokens, *redrawn.tokens), has_ended=redrawn.has_ended
        )

    async def _verify(self, request: RoundRequest, coins: random.Random) -> Verified:
        form, sampling = self.kind.verify, request.sampling
        if isinstance(form, VerifyForm):
            return form.read(request, await self.upstream.post(form.path, form.request(request)))
        request = replace(request, sampling=self._seeded(sampling, coins))
        scored = await self._scored(form, request)
        if scored is None:
            own = await self.sample(replace(request, drafted=(), num_tokens=1), coins)
            num_requests = TRIES + 1
            return Verified(
                own.tokens, 0, own.has_ended, num_requests=num_requests, is_sampled=True
            )
        request, scores, num_requests = scored
        num, own = scores.num_missing, Sampled((), has_ended=False)
        if num:
            num_requests += 1
            own = await self.sample(replace(request, drafted=(), num_tokens=num), coins)
            if own.has_ended or own.tokens != request.drafted[:num]:
                return Verified(own.tokens, 0, own.has_ended, num_requests=num_requests)
        if sampling.temperature == 0:
            verified = verify_greedily(request.drafted[num:], scores, self.is_text)
        else:
            verified = verify_by_chance(request.drafted[num:], scores, coins)
        tokens = (*own.tokens, *verified.tokens)
        return replace(
            verified,
            tokens=tokens,
            num_accepted=num + verified.num_accepted,
            num_requests=num_requests,
        )

    async def _scored(
        self, form: ScoreForm, request: RoundRequest
    ) -> tuple[RoundRequest, Scores, int] | None:
        """One score missing at most, of the draft or of its beginning; and how many requests it
        took. None: the server has fewer."""
        if not form.skips_cached:
            return request, await self.scores(form, request), 1
        for number in range(1, TRIES + 1):
            try:
                scores = await self.scores(form, request)
            except UpstreamRefused:
                continue
            if scores.num_missing <= 1:
                return request, scores, number
            room = self.room(len(request.prompt), len(request.drafted))
            request = replace(request, drafted=request.drafted[:room])
        return None

    async def scores(self, form: ScoreForm, request: RoundRequest) -> Scores:
        """Of one request. Raises as `stream`."""
        scores = form.read(request, await self.upstream.post(form.path, form.request(request)))
        self.block = math.gcd(self.block, scores.num_cached)
        return scores

    def room(self, num_prompt: int, num_drafted: int) -> int:
        """How many drafted tokens can be verified at once: up to the end of the block that the
        cache keeps next, which it may have, after a sample like this one, without its scores."""
        return min(num_drafted, self.block - num_prompt % self.block) if self.block else num_drafted

    async def _redrawn(
        self, request: RoundRequest, verified: Verified, coins: random.Random
    ) -> Sampled:
        prompt = (*request.prompt, *verified.tokens)
        request = RoundRequest(prompt, (), request.sampling, excluded=verified.rejected)
        for _ in range(MAX_REDRAWS):
            redrawn = await self.sample(request, coins)
            if redrawn.tokens[0] != verified.rejected:
                return redrawn
        raise UpstreamAnswerInvalid(
            f"{self.upstream.name} drew token {verified.rejected} {MAX_REDRAWS} times, which was "
            "to be left out"
        )

    def _seeded(self, sampling: SamplingOptions, coins: random.Random) -> SamplingOptions:
        """A seed of each request's own where noise does not depend on the place."""
        if self.kind.is_seeded or sampling.seed is None or sampling.temperature == 0:
            return sampling
        return replace(sampling, seed=coins.randrange(MAX_SEED))
