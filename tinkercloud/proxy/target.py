"""The target: the server whose samples the proxy's are."""

import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from tinkercloud.chat.requests import SamplingOptions
from tinkercloud.errors import UpstreamAnswerInvalid
from tinkercloud.proxy.answers import event_json
from tinkercloud.proxy.server_kinds import ServerKind, VerifyForm
from tinkercloud.proxy.upstream import Upstream
from tinkercloud.proxy.verification import (
    RoundRequest,
    Sampled,
    Verified,
    verify_by_chance,
    verify_greedily,
)

MAX_REDRAWS = 1000
MAX_SEED = 2**31


class Target:
    """is_text: of a token, whether it has text and cannot end a sample."""

    def __init__(self, upstream: Upstream, kind: ServerKind, is_text: Callable[[int], bool]):
        self.upstream = upstream
        self.kind = kind
        self.is_text = is_text

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
        scores = form.read(request, await self.upstream.post(form.path, form.request(request)))
        if sampling.temperature == 0:
            return verify_greedily(request.drafted, scores, self.is_text)
        return verify_by_chance(request.drafted, scores, coins)

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
