"""Finished samples as text, token by token with log-probabilities."""

import codecs
import math
from collections.abc import Sequence
from typing import Any

from tinkercloud.chat.text_model import TextCodec
from tinkercloud.core.types import SampledSequence
from tinkercloud.errors import BaseModelNotServed, ConfigError
from tinkercloud.services.chats.text_models import TextModels
from tinkercloud.services.results.finished_samples import FinishedSample, FinishedSamples

MAX_PROMPT_TOKENS = 2000  # the last ones
MAX_SEQUENCES = 8
MAX_TOKENS = 1000  # of each


class SampleTexts:
    def __init__(self, samples: FinishedSamples, texts: TextModels):
        self._samples = samples
        self._texts = texts

    async def newest(self, user: str, limit: int) -> list[dict[str, Any]]:
        """For JSON. Of models that are not served any more nothing."""
        shown: list[dict[str, Any]] = []
        for sample in await self._samples.newest(user, limit):
            try:
                text = await self._texts.get(sample.sampler.base_model)
            except (BaseModelNotServed, ConfigError):
                continue
            shown.append(_described(sample, text.codec))
        return shown


def _described(sample: FinishedSample, codec: TextCodec) -> dict[str, Any]:
    sampler, params = sample.sampler, sample.request.sampling_params
    sequences = sample.output.sequences
    return {
        "request_id": sample.request_id,
        "sampler_id": sampler.sampler_id,
        "base_model": sampler.base_model,
        "weights": sampler.model_path or sampler.model_id,
        "finished_at": sample.finished_at,
        "temperature": params.temperature,
        "seed": params.seed,
        "num_prompt_tokens": len(sample.prompt),
        "prompt": "".join(token_texts(sample.prompt[-MAX_PROMPT_TOKENS:], codec)),
        "num_sequences": len(sequences),
        "sequences": [_sequence(sequence, codec) for sequence in sequences[:MAX_SEQUENCES]],
    }


def _sequence(sequence: SampledSequence, codec: TextCodec) -> dict[str, Any]:
    texts = token_texts(sequence.tokens.tolist()[:MAX_TOKENS], codec)
    logprobs = [v if math.isfinite(v) else None for v in sequence.logprobs.tolist()]
    return {
        "tokens": [list(pair) for pair in zip(texts, logprobs, strict=False)],
        "num_tokens": len(sequence.tokens),
        "stop_reason": sequence.stop_reason,
    }


def token_texts(tokens: Sequence[int], codec: TextCodec) -> list[str]:
    """A character of several tokens is the last one's; special tokens are their names."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts: list[str] = []
    for token in tokens:
        data = codec.bytes_of(token)
        texts.append(decoder.decode(data) if data else codec.name_of(token))
    return texts
