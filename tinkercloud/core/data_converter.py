"""From the wire's data to checked core types. Everything a client can get wrong is named here.

Axes: N tokens of a datum, K alternative targets, P prompt tokens, V vocabulary.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tinker_gmi.types import EncodedTextChunk
from tinker_gmi.types import SampleRequest as JsonSampleRequest
from tinker_gmi.types import SamplingParams as JsonSamplingParams
from tinkercloud.config import MAX_TOPK_LOGPROBS
from tinkercloud.core.provenance import check_advantages, check_spans, sampled_rows
from tinkercloud.core.raw_batch import RawBatch, WireDatum, chunks_of
from tinkercloud.core.types import (
    Datum,
    RecordedSequence,
    SampleRequest,
    SamplingParams,
    ServedModel,
    TrainBatch,
)
from tinkercloud.errors import ContextLengthExceeded, InvalidRequest
from tinkercloud.losses import LOSSES, LossSpec

MAX_SAMPLES = 1024
_PENALTY_KINDS, _PENALTIES = ("presence", "frequency"), (-2.0, 2.0)  # as OpenAI's API takes them
GREEDY_BELOW = 1e-6  # a temperature under it would only overflow
# Scripts leave `weights` in the data of losses with advantages, as a mask. Those losses are then
# computed with advantages times weights, so that a token of weight 0 contributes nothing.
SCALE = "weights"


class DataConverter:
    """Checks against one served model; every fault raises InvalidRequest with where and why."""

    def __init__(self, served: ServedModel, max_topk_logprobs: int = MAX_TOPK_LOGPROBS):
        self._served = served
        self._max_topk_logprobs = max_topk_logprobs

    def train_batch(
        self, raw: RawBatch, records: Mapping[str, RecordedSequence] | None = None
    ) -> TrainBatch:
        """records: of all sequences that the spans name, where the loss needs provenance."""
        spec = LOSSES.get(raw.loss_fn)
        if spec is None:
            losses = ", ".join(LOSSES)
            raise InvalidRequest(f"loss_fn {raw.loss_fn!r} is not known; known: {losses}")
        if not raw.data:
            raise InvalidRequest("data is empty; send at least one datum")
        config = _loss_config(raw, spec)
        data = tuple(
            self._datum(f"datum {index}", datum, raw.loss_fn, spec)
            for index, datum in enumerate(raw.data)
        )
        if spec.needs_provenance:
            data = tuple(
                _with_record(f"datum {index}", datum, converted, records or {})
                for index, (datum, converted) in enumerate(zip(raw.data, data, strict=True))
            )
        return TrainBatch(data, raw.loss_fn, config, raw.forward_only)

    def _datum(self, where: str, datum: WireDatum, loss_fn: str, spec: LossSpec) -> Datum:
        tokens = self._tokens(where, datum.chunks)
        self._check_length(where, tokens)
        check_spans(where, datum, len(tokens))
        _check_names(where, datum.inputs, loss_fn, spec)
        targets = self._targets(where, datum.inputs["target_tokens"], len(tokens), spec)
        inputs: dict[str, NDArray[Any]] = {"target_tokens": targets}
        for name in spec.sent_inputs:
            if name in datum.inputs:
                inputs[name] = _located_floats(where, name, datum, targets.shape)
            else:
                inputs[name] = np.full(targets.shape, spec.absent[name], np.float32)
        if SCALE in datum.inputs and SCALE not in spec.inputs:
            scale = _located_floats(where, SCALE, datum, targets.shape)
            inputs["advantages"] = inputs["advantages"] * scale
        return Datum(tokens, inputs)

    def tokens_and_targets(
        self, where: str, datum: WireDatum
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Of a datum for a custom loss: (N,), and (N,) or (N, K)."""
        tokens = self._tokens(where, datum.chunks)
        self._check_length(where, tokens)
        if "target_tokens" not in datum.inputs:
            raise InvalidRequest(f"{where} has no input 'target_tokens'")
        spec = LOSSES["cross_entropy"]
        return tokens, self._targets(where, datum.inputs["target_tokens"], len(tokens), spec)

    def _check_length(self, where: str, tokens: NDArray[np.int32]) -> None:
        if len(tokens) > self._served.max_context_length:
            raise InvalidRequest(
                f"{where} has {len(tokens)} tokens; {self._served.name} takes at most "
                f"{self._served.max_context_length}"
            )

    def _tokens(self, where: str, chunks: Sequence[object]) -> NDArray[np.int32]:
        parts: list[NDArray[Any]] = []
        for chunk in chunks:
            if not isinstance(chunk, np.ndarray):
                kind = getattr(chunk, "kind", "unknown")
                raise InvalidRequest(
                    f"{where} has a chunk of kind {kind!r}; {self._served.name} takes text only"
                )
            parts.append(cast("NDArray[Any]", chunk))
        tokens = np.concatenate(parts) if parts else np.empty(0, np.int64)
        if tokens.size == 0:
            raise InvalidRequest(f"{where} has no tokens")
        self._check_ids(where, tokens)
        return tokens.astype(np.int32)

    def _check_ids(self, where: str, ids: NDArray[Any], lowest: int = 0) -> None:
        wrong = ids[(ids < lowest) | (ids >= self._served.vocab_size)]
        if wrong.size:
            raise InvalidRequest(
                f"{where}: token id {int(wrong[0])} is outside the vocabulary of "
                f"{self._served.name} (0..{self._served.vocab_size - 1})"
            )

    def _targets(
        self, where: str, targets: NDArray[Any], num_tokens: int, spec: LossSpec
    ) -> NDArray[np.int64]:
        where = f"{where}, input 'target_tokens'"
        if targets.dtype.kind not in "iu":
            raise InvalidRequest(f"{where} must be integers, not {targets.dtype.name}")
        allowed = (1, 2) if spec.multi_target else (1,)
        if targets.ndim not in allowed or len(targets) != num_tokens or targets.size == 0:
            shapes = "(N,) or (N, K)" if spec.multi_target else "(N,)"
            raise InvalidRequest(
                f"{where} has shape {targets.shape}; it must be {shapes} with N = {num_tokens}, "
                "the number of input tokens"
            )
        self._check_ids(where, targets)
        return targets.astype(np.int64)

    # sampling

    def sample_request(self, body: JsonSampleRequest) -> SampleRequest:
        _check_num_samples(body)
        room = self.room_after(body)  # before an array is made of the prompt
        prompt = self._tokens("the prompt", chunks_of(body.prompt))
        params = self._params(seeded(body).sampling_params)
        max_tokens = min(room, params.max_tokens or room)
        self._check_topk(body, len(prompt), max_tokens)
        return SampleRequest(
            prompt,
            body.num_samples,
            params,
            prompt_logprobs=bool(body.prompt_logprobs),
            prompt_logprobs_last_n=_last_n(body.prompt_logprobs_last_n, len(prompt)),
            topk_prompt_logprobs=body.topk_prompt_logprobs,
            topk_sample_logprobs=body.topk_sample_logprobs,
            target_prompt_logprobs=self._prompt_targets(body, len(prompt)),
            prompt_alt_tokens=body.prompt_alt_tokens_k,
        )

    def room_after(self, body: JsonSampleRequest) -> int:
        """How many tokens fit behind the prompt. Raises ContextLengthExceeded where there is not
        one."""
        length = sum(len(c.tokens) for c in body.prompt.chunks if isinstance(c, EncodedTextChunk))
        room = self._served.max_context_length - length
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {length} tokens; {self._served.name} holds "
                f"{self._served.max_context_length} with at least one to sample"
            )
        return room

    def _params(self, params: JsonSamplingParams) -> SamplingParams:
        _check_params(params)
        assert params.seed is not None
        strings, ids = _stop(params.stop)
        self._check_ids("stop", np.array(ids, dtype=np.int64))
        top_k = -1 if params.top_k >= self._served.vocab_size else params.top_k
        return SamplingParams(
            params.max_tokens,
            params.seed % 2**64,
            temperature=0.0 if params.temperature < GREEDY_BELOW else params.temperature,
            top_k=top_k,
            top_p=params.top_p,
            min_p=params.min_p or 0.0,
            presence_penalty=params.presence_penalty or 0.0,
            frequency_penalty=params.frequency_penalty or 0.0,
            stop_strings=strings,
            stop_token_ids=ids,
            use_eos=params.stop != [],
        )

    def _check_topk(self, body: JsonSampleRequest, prompt_length: int, max_tokens: int) -> None:
        """Before any is computed: engine and API process hold the whole answer."""
        counts = {
            "topk_prompt_logprobs": (body.topk_prompt_logprobs, f"{prompt_length} of the prompt"),
            "prompt_alt_tokens_k": (body.prompt_alt_tokens_k, f"{prompt_length} of the prompt"),
            "topk_sample_logprobs": (
                body.topk_sample_logprobs,
                f"{body.num_samples} x {max_tokens} of samples (num_samples x max_tokens)",
            ),
        }
        for name, (k, _) in counts.items():
            if not 0 <= k <= self._served.vocab_size:
                raise InvalidRequest(
                    f"{name} is {k}; it must lie in 0..{self._served.vocab_size}, the vocabulary"
                )
        prompt_k = body.topk_prompt_logprobs + body.prompt_alt_tokens_k
        total = prompt_length * prompt_k + body.num_samples * max_tokens * body.topk_sample_logprobs
        if total > self._max_topk_logprobs:
            terms = " + ".join(f"{name} {k} x {at}" for name, (k, at) in counts.items() if k)
            raise InvalidRequest(
                f"this sample asks for {total} log-probabilities of alternatives ({terms} "
                f"positions); this server gives at most {self._max_topk_logprobs} in one answer "
                "(max_topk_logprobs): lower k, or send fewer samples or a part of the prompt"
            )

    def _prompt_targets(
        self, body: JsonSampleRequest, prompt_length: int
    ) -> NDArray[np.int64] | None:
        if body.target_prompt_logprobs is None:
            return None
        where = "target_prompt_logprobs"
        targets = body.target_prompt_logprobs.to_numpy()
        if targets.dtype.kind not in "iu" or targets.ndim != 2 or targets.shape[1] == 0:
            raise InvalidRequest(f"{where} must be int64 of shape (P - 1, K)")
        if len(targets) != prompt_length - 1:
            raise InvalidRequest(
                f"{where} has {len(targets)} rows; a prompt of {prompt_length} tokens needs "
                f"{prompt_length - 1}"
            )
        self._check_ids(where, targets, lowest=-1)
        return targets.astype(np.int64)


def _with_record(
    where: str, sent: WireDatum, datum: Datum, records: Mapping[str, RecordedSequence]
) -> Datum:
    """With the sampler's log-probabilities as they were recorded, whatever the client sent."""
    arrays = datum.tokens, datum.inputs["target_tokens"]
    rows = sampled_rows(where, sent, arrays, records)
    check_advantages(where, datum.inputs["advantages"], rows.mask)
    recorded = {"logprobs": rows.logprobs, "sampled_mask": rows.mask}
    return Datum(datum.tokens, {**datum.inputs, **recorded})


def _loss_config(raw: RawBatch, spec: LossSpec) -> dict[str, float]:
    config = dict(spec.defaults)
    for name, value in raw.loss_fn_config.items():
        if name not in config:
            options = ", ".join(config) or "none"
            raise InvalidRequest(
                f"loss_fn_config {name!r} is not known to {raw.loss_fn}; known: {options}"
            )
        if isinstance(value, str) or not math.isfinite(value):
            raise InvalidRequest(f"loss_fn_config {name!r} must be a finite number, not {value!r}")
        config[name] = float(value)
    if spec.needs_provenance and config["clip_high_threshold"] <= 0:
        raise InvalidRequest("loss_fn_config 'clip_high_threshold' must be above 0")
    if config.get("kl_coeff", 0.0) < 0:
        raise InvalidRequest("loss_fn_config 'kl_coeff' must be at least 0")
    if config.get("clip_low_threshold", 0.0) > config.get("clip_high_threshold", math.inf):
        raise InvalidRequest("clip_low_threshold is above clip_high_threshold")
    return config


def _check_names(
    where: str, inputs: Mapping[str, NDArray[Any]], loss_fn: str, spec: LossSpec
) -> None:
    required = ["target_tokens", *(n for n in spec.sent_inputs if n not in spec.absent)]
    scale = [SCALE] if "advantages" in spec.inputs else []
    optional = [*spec.absent, *scale, *spec.ignored_inputs]
    missing = [name for name in required if name not in inputs]
    unknown = sorted(set(inputs) - {*required, *optional})
    if missing or unknown:
        fault = f"lacks {missing}" if missing else f"has unknown {unknown}"
        more = f" and may have {optional}" if optional else ""
        raise InvalidRequest(
            f"{where} {fault} in loss_fn_inputs; {loss_fn} takes exactly {required}{more}"
        )


def _located_floats(
    where: str, name: str, datum: WireDatum, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    return _floats(f"{where}, input {name!r}", datum.inputs[name], shape)


def _floats(where: str, values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[np.float32]:
    if values.shape != shape:
        raise InvalidRequest(f"{where} has shape {values.shape}; target_tokens has {shape}")
    if not np.isfinite(values).all():
        raise InvalidRequest(f"{where} has values that are not finite")
    return values.astype(np.float32)


def seeded(body: JsonSampleRequest) -> JsonSampleRequest:
    """The request with a seed, drawn where it has none."""
    params = body.sampling_params
    if params.seed is not None:
        return body
    params = params.model_copy(update={"seed": secrets.randbits(64)})
    return body.model_copy(update={"sampling_params": params})


def _check_num_samples(body: JsonSampleRequest) -> None:
    if not 1 <= body.num_samples <= MAX_SAMPLES:
        raise InvalidRequest(f"num_samples is {body.num_samples}; it must lie in 1..{MAX_SAMPLES}")


def _last_n(last_n: int | None, prompt_length: int) -> int | None:
    if last_n is not None and not 1 <= last_n <= prompt_length - 1:
        raise InvalidRequest(
            f"prompt_logprobs_last_n is {last_n}; for a prompt of {prompt_length} tokens it must "
            f"lie in 1..{prompt_length - 1}"
        )
    return last_n


def _check_params(params: JsonSamplingParams) -> None:
    if params.max_tokens is not None and params.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {params.max_tokens}; it must be at least 1")
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise InvalidRequest(f"temperature is {params.temperature}; it must be finite and >= 0")
    if not 0 < params.top_p <= 1:
        raise InvalidRequest(f"top_p is {params.top_p}; it must lie in (0, 1]")
    ranges = {"min_p": (0.0, 1.0)} | {f"{kind}_penalty": _PENALTIES for kind in _PENALTY_KINDS}
    for name, (lowest, highest) in ranges.items():
        value = getattr(params, name)
        if value is not None and not lowest <= value <= highest:
            raise InvalidRequest(f"{name} is {value}; it must lie in {lowest}..{highest}")
    if params.top_k != -1 and params.top_k < 1:
        raise InvalidRequest(f"top_k is {params.top_k}; it must be at least 1, or -1 for no limit")


def _stop(stop: str | list[str] | list[int] | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """(strings, token ids)"""
    if stop is None:
        return (), ()
    stops = [stop] if isinstance(stop, str) else stop
    if "" in stops:
        raise InvalidRequest("stop has an empty string")
    strings = tuple(item for item in stops if isinstance(item, str))
    ids = tuple(item for item in stops if not isinstance(item, str))
    if any(abs(token) >= 2**63 for token in ids):
        raise InvalidRequest("a token id in stop does not fit in 64 bits")
    return strings, ids
