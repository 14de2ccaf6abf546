"""Sample requests as bodies of SGLang's /generate, and its answers as sample outputs.

One body per sample: each sample has its own noise, and SGLang shares the prompt among them by its
prefix cache. The first body also scores the prompt. Prompt targets differ from position to
position, but SGLang scores one list of ids (`token_ids_logprob`) at every position of a request: so
they are scored in blocks of positions, each a request of its own over the prompt's beginning.

Axes: P prompt tokens, K targets per position, S sampled tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tinkercloud.cluster.rollout.sampling_params import commit, custom_params, grammar_params
from tinkercloud.core.types import (
    SampledSequence,
    SampleOutput,
    SampleRequest,
    SamplingParams,
    StopReason,
    Topk,
)
from tinkercloud.errors import EngineDied, UserError

Body = dict[str, Any]

UNSCORED_LOGPROB = -99999.0
TARGET_BLOCK = 64
_LOWEST = -1e30  # SGLang sends the lowest float32 for minus infinity, which is not JSON


class Aborted(Exception):
    """The engine aborted the request, by our order or by itself; it may be sent again."""


@dataclass(frozen=True, slots=True)
class Served:
    """The model that the engines serve. context_length: tokens."""

    context_length: int
    eos_token_ids: tuple[int, ...]


def sample_bodies(
    request: SampleRequest,
    adapter: str | None,
    served: Served,
    committed: Sequence[Sequence[int]] = (),
) -> list[Body]:
    """One per sample, in order. committed: tokens that a sample must begin with, of each. Raises
    UserError."""
    if request.prompt_alt_tokens:
        raise UserError(
            "prompt_alt_tokens_k is not supported by the cluster backend: its engines score "
            "prompts but draw nothing there; topk_prompt_logprobs has each position's likeliest"
        )
    grammar = grammar_params(request.grammar)
    scored = request.prompt_logprobs or request.topk_prompt_logprobs > 0
    bodies: list[Body] = []
    for index in range(request.num_samples):
        start = _first_scored(request) - 1 if scored and index == 0 else -1
        topk = request.topk_sample_logprobs
        if index == 0:
            topk = max(topk, request.topk_prompt_logprobs)
        body = _body(request.prompt, request, index, adapter, served)
        body["sampling_params"] |= grammar
        if committed and committed[index]:
            commit(body["sampling_params"]["custom_params"], request.prompt, committed[index])
        bodies.append(body | {"logprob_start_len": start, "top_logprobs_num": topk})
    return bodies


def target_bodies(request: SampleRequest, adapter: str | None, served: Served) -> list[Body]:
    """One per block of positions that has a target; see `_block_rows`."""
    params = SamplingParams(max_tokens=1, seed=0, temperature=0.0, use_eos=False)
    scoring = replace(request, params=params)
    bodies: list[Body] = []
    for first, end, ids in _target_blocks(request.target_prompt_logprobs):
        body = _body(request.prompt[: end + 1], scoring, 0, adapter, served)
        bodies.append(body | {"logprob_start_len": first, "token_ids_logprob": ids})
    return bodies


def sample_output(
    request: SampleRequest,
    samples: Sequence[Mapping[str, Any]],
    targets: Sequence[Mapping[str, Any]],
) -> SampleOutput:
    """samples, targets: SGLang's answers to the bodies, in their order.

    Raises Aborted, and EngineDied for an answer that makes no sense.
    """
    metas = [_meta(answer) for answer in (*samples, *targets)]
    sequences = tuple(_sequence(meta, request) for meta in metas[: len(samples)])
    first, length = metas[0], len(request.prompt)
    scored = {"first": _first_scored(request), "length": length}
    return SampleOutput(
        sequences=sequences,
        prompt_logprobs=_prompt_logprobs(first, **scored) if request.prompt_logprobs else None,
        topk_prompt_logprobs=(
            _prompt_topk(first, request.topk_prompt_logprobs, **scored)
            if request.topk_prompt_logprobs
            else None
        ),
        target_prompt_logprobs=_target_logprobs(request, metas[len(samples) :]),
        prompt_cache_hit_tokens=int(first.get("cached_tokens") or 0),
    )


def _body(
    prompt: NDArray[np.int32],
    request: SampleRequest,
    index: int,
    adapter: str | None,
    served: Served,
) -> Body:
    """prompt: the request's, or its beginning."""
    params = request.params
    room = served.context_length - len(prompt)
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    body: Body = {
        "input_ids": prompt.tolist(),
        "sampling_params": {
            "max_new_tokens": max(1, max_tokens),
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "custom_params": custom_params(params, index, served.eos_token_ids),
        },
        "return_logprob": True,
    }
    if request.cache_salt:  # a namespace of SGLang's prefix cache
        digest = blake2b(request.cache_salt.encode(), digest_size=16).hexdigest()
        body["extra_key"] = digest
    return body | {"lora_path": adapter} if adapter is not None else body


def _first_scored(request: SampleRequest) -> int:
    """The first position of the prompt that is scored; at least 1."""
    last_n = request.prompt_logprobs_last_n
    return 1 if last_n is None else max(1, len(request.prompt) - last_n)


def _meta(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = answer["meta_info"]
    finish_of(meta)
    return meta


def finish_of(meta: Mapping[str, Any]) -> str | None:
    """How a sample ended; None: it goes on. Raises Aborted."""
    reason = meta["finish_reason"]
    if reason is not None and reason["type"] == "abort":
        raise Aborted(str(reason.get("message")))
    return None if reason is None else reason["type"]


def topk_of_rows(rows: Sequence[Any], k: int) -> Topk:
    """SGLang's rows of sampled tokens, the k best of each."""
    return _topk(rows, k, 0, len(rows))


def _sequence(meta: Mapping[str, Any], request: SampleRequest) -> SampledSequence:
    rows = meta["output_token_logprobs"]
    kind = meta["finish_reason"]["type"]
    if kind not in ("stop", "length") or not rows:
        raise EngineDied(f"the engine answered {len(rows)} tokens, finished by {kind!r}")
    k = request.topk_sample_logprobs
    return SampledSequence(
        tokens=np.array([row[1] for row in rows], np.int32),
        logprobs=np.array([row[0] for row in rows], np.float32),
        stop_reason=cast(StopReason, kind),
        topk=_topk(meta["output_top_logprobs"], k, 0, len(rows)) if k else None,
    )


def _prompt_logprobs(meta: Mapping[str, Any], first: int, length: int) -> NDArray[np.float32]:
    scores = np.full(length, np.nan, np.float32)
    # The first row is that of `logprob_start_len`, the position before `first`, without a score.
    rows = meta["input_token_logprobs"][1:]
    if length > first:
        scores[first:] = [row[0] for row in rows]
    return scores


def _prompt_topk(meta: Mapping[str, Any], k: int, first: int, length: int) -> Topk:
    rows = (meta.get("input_top_logprobs") or [None])[1:]
    return _topk(rows, k, first, length)


def _topk(rows: Sequence[Any], k: int, first: int, length: int) -> Topk:
    """rows[i] belongs to position first + i: [[logprob, id, text], ...], best first."""
    ids = np.zeros((length, k), np.int32)
    values = np.full((length, k), UNSCORED_LOGPROB, np.float32)
    for position, row in enumerate(rows, first):
        possible = [pair for pair in row[:k] if pair[0] > _LOWEST]
        if possible:
            ids[position, : len(possible)] = [pair[1] for pair in possible]
            values[position, : len(possible)] = [pair[0] for pair in possible]
    return Topk(ids, values)


def _target_blocks(targets: NDArray[np.int64] | None) -> list[tuple[int, int, list[int]]]:
    """(first, end, ids): rows first..end-1 have these ids as targets. Row i scores position i+1."""
    if targets is None:
        return []
    blocks: list[tuple[int, int, list[int]]] = []
    for first in range(0, len(targets), TARGET_BLOCK):
        end = min(first + TARGET_BLOCK, len(targets))
        ids = np.unique(targets[first:end])
        ids = ids[ids >= 0]
        if len(ids):
            blocks.append((first, end, ids.tolist()))
    return blocks


def _target_logprobs(
    request: SampleRequest, metas: Sequence[Mapping[str, Any]]
) -> NDArray[np.float32] | None:
    targets = request.target_prompt_logprobs
    if targets is None:
        return None
    scores = np.zeros(targets.shape, np.float32)
    for (first, end, ids), meta in zip(_target_blocks(targets), metas, strict=True):
        rows = meta["input_token_ids_logprobs"][1:]
        table = np.array([[pair[0] for pair in row] for row in rows], np.float32)
        block = targets[first:end]
        columns = np.searchsorted(ids, np.maximum(block, ids[0]))  # ids are sorted; -1: no target
        picked = np.take_along_axis(table, columns, 1)
        scores[first:end] = np.where(block >= 0, picked, 0.0)
    return scores
