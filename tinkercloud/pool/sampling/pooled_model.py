"""One model of a pool, sampled through the pool's llama-server."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from tinkercloud.chat.text_model import TextCodec
from tinkercloud.core.types import (
    OnTokens,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    ServedModel,
    StopReason,
    TokenChunk,
    Topk,
)
from tinkercloud.decoding.distribution import Floats, distribution
from tinkercloud.decoding.stops import StopRule
from tinkercloud.errors import UpstreamAnswerInvalid, UpstreamUnreachable, UserError
from tinkercloud.pool.pool_file import Model
from tinkercloud.pool.sampling.completions import (
    Drawn,
    completion_body,
    draw_seed,
    read_completion,
    read_scores,
    scoring_body,
)

PIECE_TOKENS = 16
"""That one request to llama-server samples. More come at once to a reader of the stream, fewer cost
a request each; what a seed gives depends on it."""
UNSCORED = -99999.0


class PooledModel:
    """http: to the pool's llama-server, with its key."""

    def __init__(
        self, model: Model, served: ServedModel, codec: TextCodec, http: httpx.AsyncClient
    ):
        self.served = served
        self._model = model
        self._codec = codec
        self._http = http
        self._slots = asyncio.Semaphore(model.parallel)
        self.piece_tokens = max(PIECE_TOKENS, model.drafted_tokens if model.draft else 0)

    @property
    def is_full(self) -> bool:
        """Whether a sample waits for others."""
        return self._slots.locked()

    def check(self, request: SampleRequest) -> None:
        """Raises UserError."""
        name = self.served.name
        if request.scores_prompt:
            raise UserError(
                f"{name} is a pool's model: llama.cpp gives no log-probabilities of prompts. Ask "
                "for none, or use a model that this server has loaded itself"
            )
        if request.grammar is not None:
            raise UserError(f"{name} is a pool's model, whose samples follow no grammar here")
        if request.params.has_penalties:
            raise UserError(
                f"{name} is a pool's model: llama.cpp counts the prompt's tokens for penalties "
                "too. Set presence_penalty and frequency_penalty to 0"
            )
        if request.needs_logprobs and self._model.draft is not None:
            raise UserError(
                f"{name} is a pool's model with drafts, of which llama.cpp gives no "
                "log-probabilities. Ask for none (chats and completions without logprobs), or "
                "take `draft` out of the pool's file"
            )

    async def sample(self, request: SampleRequest, on_tokens: OnTokens | None) -> SampleOutput:
        """Raises UserError, UpstreamUnreachable, UpstreamAnswerInvalid."""
        self.check(request)
        samples = [_Sample(self, request, index, on_tokens) for index in range(request.num_samples)]
        tasks = [asyncio.ensure_future(self._run(sample)) for sample in samples]
        try:
            await asyncio.gather(*tasks)
        finally:  # the first error, or the caller's end, is that of all
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return SampleOutput(tuple(sample.sequence() for sample in samples))

    async def _run(self, sample: "_Sample") -> None:
        async with self._slots:
            while sample.stop_reason is None:
                await sample.grow()

    async def drawn(self, tokens: list[int], num: int, request: SampleRequest, index: int) -> Drawn:
        """The next ones of a sample, at least one of them."""
        seed = draw_seed(request.params.seed, index, len(tokens))
        body = completion_body(tokens, num, request.params, seed, request.topk_sample_logprobs)
        # A request that is answered sooner for a prompt that others sent would tell so. What
        # follows finds the sample's own tokens alone.
        is_first = len(tokens) == len(request.prompt)
        body["cache_prompt"] = not (is_first and request.cache_salt)
        return read_completion(await self._post(body), self._codec.bytes_of, num)

    async def scores(self, tokens: list[int], request: SampleRequest) -> Floats:
        """(V,) of what comes after `tokens`, where llama-server did not tell them."""
        size = self.served.vocab_size
        body = scoring_body(tokens, self.served.eos_token_ids[0], size)
        scores = read_scores(await self._post(body), size)
        return scores if request.params.temperature == 0 else distribution(scores, request.params)

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        codec = self._codec
        pieces = (codec.bytes_of(token) or codec.name_of(token).encode() for token in ids)
        return b"".join(pieces).decode(errors="replace")

    async def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            response = await self._http.post("/completion", json=body)
        except httpx.HTTPError as error:
            raise UpstreamUnreachable(await self._why_not(error)) from None
        if response.status_code != httpx.codes.OK:
            raise self._refused(response)
        answer = _json(response)
        if answer.get("model") != self.served.name:
            raise UserError(
                f"the pool serves {str(answer.get('model'))[:100]} now; "
                f"`tinkercloud pool swap {self.served.name}` makes it serve {self.served.name}"
            )
        return answer

    def _refused(self, response: httpx.Response) -> Exception:
        error = _json(response).get("error")
        text = str(error.get("message") if isinstance(error, Mapping) else response.text)[:500]
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            return UpstreamUnreachable(f"the pool is loading {self.served.name}: {text}")
        if response.status_code == httpx.codes.UNAUTHORIZED:
            return UpstreamUnreachable(f"the pool's llama-server wants another key: {text}")
        return UserError(f"the pool's llama-server refuses this: {text}")

    async def _why_not(self, error: httpx.HTTPError) -> str:
        reason = str(error) or type(error).__name__
        return (
            f"the pool's llama-server at {self._http.base_url} does not answer ({reason}); "
            "`tinkercloud pool status` says why, `tinkercloud pool start` starts it"
        )


@dataclass(slots=True)
class _Sample:
    """A sample while it is drawn."""

    model: PooledModel
    request: SampleRequest
    index: int
    on_tokens: OnTokens | None
    tokens: list[int] = field(init=False)  # with the prompt's
    logprobs: list[float] = field(default_factory=list[float])
    tops: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])
    stop_reason: StopReason | None = None
    rule: StopRule = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.request.prompt.tolist()
        self.rule = StopRule(self.request.params, self.model.served.eos_token_ids, self.model)

    @property
    def _num_left(self) -> int:
        num_prompt = len(self.request.prompt)
        room = self.model.served.max_context_length - num_prompt
        max_tokens = self.request.params.max_tokens
        limit = room if max_tokens is None else min(max_tokens, room)
        return limit - len(self.logprobs)

    async def grow(self) -> None:
        """By the tokens of one request; the reader of its stream gets them."""
        first = len(self.logprobs)
        num = min(self.model.piece_tokens, self._num_left)
        drawn = await self.model.drawn(self.tokens, num, self.request, self.index)
        for token, logprob, top in zip(drawn.tokens, drawn.logprobs, drawn.tops, strict=True):
            if math.isnan(logprob) and self.request.needs_logprobs:
                scores = await self.model.scores(self.tokens, self.request)
                logprob, top = float(scores[token]), _likeliest(scores, self.request)
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.tops.append(top)
            if self.rule.ends(self.tokens, len(self.request.prompt)):
                self.stop_reason = "stop"
            elif self._num_left == 0:
                self.stop_reason = "length"
            if self.stop_reason is not None:
                break
        if self.on_tokens is not None:
            tokens, logprobs, topk = self._since(first)
            self.on_tokens(TokenChunk(self.index, tokens, logprobs, self.stop_reason, topk))

    def sequence(self) -> SampledSequence:
        """When all is drawn."""
        assert self.stop_reason is not None
        tokens, logprobs, topk = self._since(0)
        return SampledSequence(tokens, logprobs, self.stop_reason, topk)

    def _since(self, first: int) -> tuple[NDArray[np.int32], NDArray[np.float32], Topk | None]:
        """Of its tokens from one on."""
        tokens = self.tokens[len(self.request.prompt) + first :]
        k = self.request.topk_sample_logprobs
        topk = _topk(self.tops[first:], k) if k else None
        return np.array(tokens, np.int32), np.array(self.logprobs[first:], np.float32), topk


def _likeliest(scores: Floats, request: SampleRequest) -> list[tuple[int, float]]:
    best = np.argsort(-scores, kind="stable")[: request.topk_sample_logprobs]
    return [(token, float(scores[token])) for token in best.tolist() if np.isfinite(scores[token])]


def _topk(tops: list[list[tuple[int, float]]], k: int) -> Topk:
    """Where samplers left fewer than k, the others are as unscored."""
    ids = np.zeros((len(tops), k), np.int32)
    logprobs = np.full((len(tops), k), UNSCORED, np.float32)
    for row, top in enumerate(tops):
        for place, (token, logprob) in enumerate(top[:k]):
            ids[row, place], logprobs[row, place] = token, logprob
    return Topk(ids, logprobs)


def _json(response: httpx.Response) -> dict[str, Any]:
    """Raises UpstreamAnswerInvalid."""
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise UpstreamAnswerInvalid("the pool's llama-server answers with no JSON object")
    return answer
