"""Samples of the fake backend's model.

Axes: P prompt tokens, V vocabulary, K targets.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tinkercloud.backends.fake_model import Published
from tinkercloud.core.types import (
    Grammar,
    OnTokens,
    PromptAltTokens,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    SamplingParams,
    StopReason,
    TokenChunk,
    Topk,
)
from tinkercloud.decoding.distribution import Floats, distribution, log_softmax
from tinkercloud.errors import UserError
from tinkercloud.grammar.compiler import CompiledGrammar, GrammarCompiler, SampleGrammar


def draw_samples(
    version: Published, request: SampleRequest, on_tokens: OnTokens | None = None
) -> SampleOutput:
    """A token for each sample, then the next one for each, as an engine does. What on_tokens raises
    ends it. Raises UserError for a grammar that cannot be used."""
    if request.grammar is None:
        samples = [_Sample(version, request, index) for index in range(request.num_samples)]
        _draw_all(samples, on_tokens)
    else:
        compiled = _compiled(version, request.grammar)
        with ThreadPoolExecutor(1) as executor:
            samples = [
                _Sample(version, request, index, compiled.begin(executor))
                for index in range(request.num_samples)
            ]
            _draw_all(samples, on_tokens)
    sequences = tuple(sample.sequence() for sample in samples)
    if not request.scores_prompt:
        return SampleOutput(sequences)
    after = version.base.logprobs(version.table, request.prompt[:-1])  # (P-1, V): row i scores i+1
    return SampleOutput(
        sequences,
        prompt_logprobs=_prompt_logprobs(after, request) if request.prompt_logprobs else None,
        topk_prompt_logprobs=_prompt_topk(after, request),
        target_prompt_logprobs=_prompt_targets(after, request.target_prompt_logprobs),
        prompt_alt_tokens=_prompt_alternatives(after, request),
    )


def _prompt_alternatives(after: Floats, request: SampleRequest) -> PromptAltTokens | None:
    k, params = request.prompt_alt_tokens, request.params
    if k == 0:
        return None
    tokens = np.zeros((len(after), k), np.int64)
    # Without the cuts and penalties of samples: draws are the model's, at a temperature.
    free = SamplingParams(None, params.seed, params.temperature)
    for row, logprobs in enumerate(after):
        for draw in range(k):
            tokens[row, draw] = _draw(logprobs, free, (_ALTERNATIVES | draw, row + 1))[0]
    scores = np.take_along_axis(after, tokens, axis=1).astype(np.float32)
    return PromptAltTokens(tokens, scores)


_ALTERNATIVES = 1 << 31  # in the place of a sample's index, which is smaller


def _compiled(version: Published, grammar: Grammar) -> CompiledGrammar:
    served = version.base.served
    folder = served.tokenizer_path
    if folder is None or not (folder / "tokenizer.json").is_file():
        raise UserError(f"{served.name} has no tokenizer.json, which grammars need")
    text = (folder / "tokenizer.json").read_text()
    return GrammarCompiler(text, served.vocab_size, served.eos_token_ids).compile(grammar)


def _draw_all(samples: Sequence["_Sample"], on_tokens: OnTokens | None) -> None:
    running = [sample.draw() for sample in samples]
    while running:
        # A generator that has no more tokens gives None.
        chunks = [(drawing, next(drawing, None)) for drawing in running]
        running = [drawing for drawing, chunk in chunks if chunk is not None]
        for _, chunk in chunks:
            if chunk is not None and on_tokens is not None:
                on_tokens(chunk)


@dataclass(slots=True)
class _Sample:
    """A sample while it is drawn."""

    version: Published
    request: SampleRequest
    index: int
    grammar: SampleGrammar | None = None
    tokens: list[int] = field(default_factory=list[int])
    distributions: list[Floats] = field(default_factory=list[Floats])
    stop_reason: StopReason | None = None

    def draw(self) -> Iterator[TokenChunk]:
        """A chunk for each token."""
        request, version = self.request, self.version
        params, served = request.params, version.base.served
        room = served.max_context_length - len(request.prompt)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        eos = served.eos_token_ids if params.use_eos else ()
        stops = frozenset((*params.stop_token_ids, *eos))
        token, text = int(request.prompt[-1]), ""
        while self.stop_reason is None:
            after = version.base.logprobs(version.table, np.array([token]))[0]
            place = self.index, len(request.prompt) + len(self.tokens)
            token, drawn_from = _draw(self._penalized(self._masked(after)), params, place)
            self.tokens.append(token)
            self.distributions.append(drawn_from)
            text += f"{token} "
            if self.grammar is not None:
                self.grammar.accept(token)
            is_over = self.grammar is not None and self.grammar.is_over
            if is_over or token in stops or any(stop in text for stop in params.stop_strings):
                self.stop_reason = "stop"
            elif len(self.tokens) == limit:
                self.stop_reason = "length"
            tokens, logprobs, topk = self._since(len(self.tokens) - 1)
            yield TokenChunk(self.index, tokens, logprobs, self.stop_reason, topk)

    def _masked(self, logprobs: Floats) -> Floats:
        """(V,) under what its grammar takes next."""
        if self.grammar is None:
            return logprobs
        return log_softmax(np.where(self.grammar.allowed(), logprobs, -np.inf))

    def _penalized(self, logprobs: Floats) -> Floats:
        """(V,) less the penalties of the tokens that it has; log-probabilities again."""
        params = self.request.params
        if not params.has_penalties or not self.tokens:
            return logprobs
        counts = np.bincount(self.tokens, minlength=len(logprobs))
        penalties = params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
        return log_softmax(logprobs - penalties)

    def sequence(self) -> SampledSequence:
        """When all is drawn."""
        assert self.stop_reason is not None
        tokens, logprobs, topk = self._since(0)
        return SampledSequence(tokens, logprobs, self.stop_reason, topk)

    def _since(self, first: int) -> tuple[NDArray[np.int32], NDArray[np.float32], Topk | None]:
        """Tokens from `first` on, their log-probabilities, and the k best."""
        tokens, distributions = self.tokens[first:], self.distributions[first:]
        scores = [d[token] for d, token in zip(distributions, tokens, strict=True)]
        k = self.request.topk_sample_logprobs
        topk = _topk(np.stack(distributions), k) if k else None
        return np.array(tokens, np.int32), np.array(scores, np.float32), topk


def _prompt_logprobs(after: Floats, request: SampleRequest) -> NDArray[np.float32]:
    scored = np.full(len(request.prompt), np.nan, dtype=np.float32)
    scored[1:] = after[np.arange(len(after)), request.prompt[1:]]
    if request.prompt_logprobs_last_n is not None:
        scored[: -request.prompt_logprobs_last_n] = np.nan
    return scored


def _prompt_topk(after: Floats, request: SampleRequest) -> Topk | None:
    k = request.topk_prompt_logprobs
    if k == 0:
        return None
    rows = _topk(after, k)
    unscored = Topk(np.zeros((1, k), np.int32), np.full((1, k), -99999.0, np.float32))
    ids = np.concatenate([unscored.token_ids, rows.token_ids])
    values = np.concatenate([unscored.logprobs, rows.logprobs])
    if request.prompt_logprobs_last_n is not None:
        ids[: -request.prompt_logprobs_last_n] = 0
        values[: -request.prompt_logprobs_last_n] = -99999.0
    return Topk(ids, values)


def _prompt_targets(after: Floats, targets: NDArray[np.int64] | None) -> NDArray[np.float32] | None:
    if targets is None:
        return None
    scored = np.take_along_axis(after, np.maximum(targets, 0), axis=1)
    return np.where(targets < 0, 0.0, scored).astype(np.float32)


def _topk(logprobs: Floats, k: int) -> Topk:
    ids = np.argsort(-logprobs, axis=-1, kind="stable")[:, :k]
    return Topk(ids.astype(np.int32), np.take_along_axis(logprobs, ids, 1).astype(np.float32))


def _draw(logprobs: Floats, params: SamplingParams, place: tuple[int, int]) -> tuple[int, Floats]:
    """A token and the distribution that it was drawn from; noise is keyed by (sample, position)."""
    if params.temperature == 0:
        return int(np.argmax(logprobs)), logprobs
    drawn_from = distribution(logprobs, params)
    key = np.array([params.seed, (place[0] << 32) | place[1]], dtype=np.uint64)
    noise = np.random.Generator(np.random.Philox(key=key)).gumbel(size=len(drawn_from))
    return int(np.argmax(drawn_from + noise)), drawn_from
