"""The kinds of servers that the proxy can ask by tokens: their requests, and what answers say.

A drafter samples; a target samples and verifies. One request verifies a round: our own server has
an endpoint for it, of vLLM and SGLang prompt and draft are sent as a prompt whose log-probabilities
are asked for, and one token is sampled after it. vLLM and SGLang take defaults of sampling from the
model's generation_config.json, so every one that matters is sent.

vLLM computes such a prompt from its beginning, unless it is told that its cache may be read, which
its OpenAI API does not know and its /inference/v1/generate does. What the answer then says of
tokens that were read from the cache is what happened to be in the memory: how many they are is in
its usage, and nothing of them is read here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tinkercloud.chat.requests import SamplingOptions
from tinkercloud.errors import UpstreamAnswerInvalid
from tinkercloud.proxy.answers import (
    Json,
    json_list,
    json_object,
    likeliest,
    log_probability,
    only,
    token_id,
    token_ids,
)
from tinkercloud.proxy.upstream import SGLANG_PATH
from tinkercloud.proxy.verification import RoundRequest, Sampled, ScoredToken, Scores, Verified

TOP = 2
"""With one alone a tie for the likeliest token would not be seen."""


@dataclass(frozen=True, slots=True)
class SampleForm:
    """path: below the upstream's OpenAI base URL, or, with a slash, below its root. read_event: the
    new tokens of an event of a stream, after so many that came before; maybe none."""

    path: str
    request: Callable[[RoundRequest], dict[str, Any]]
    read: Callable[[RoundRequest, Json], Sampled]
    read_event: Callable[[RoundRequest, Json, int], Sampled]


@dataclass(frozen=True, slots=True)
class ScoreForm:
    """skips_cached: its answers have no scores of what the server has in its cache, and it may fail
    over what is in their place."""

    path: str
    request: Callable[[RoundRequest], dict[str, Any]]
    read: Callable[[RoundRequest, Json], Scores]
    skips_cached: bool = False


@dataclass(frozen=True, slots=True)
class VerifyForm:
    path: str
    request: Callable[[RoundRequest], dict[str, Any]]
    read: Callable[[RoundRequest, Json], Verified]


@dataclass(frozen=True, slots=True)
class ServerKind:
    """verify: how a target is asked. is_seeded: its sample is a function of its seed and of
    positions, so that rounds of one seed are one sample. computes_prompt: a verification reads the
    prompt again, whatever of it is cached."""

    name: str
    sample: SampleForm
    verify: ScoreForm | VerifyForm
    is_seeded: bool = False
    computes_prompt: bool = False


# ---- vLLM


def _vllm_sampling(sampling: SamplingOptions) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        **({} if sampling.seed is None else {"seed": sampling.seed}),
    }


def _vllm_sample(request: RoundRequest) -> dict[str, Any]:
    return {
        "prompt": request.tokens,
        "max_tokens": request.num_tokens,
        "return_token_ids": True,
        **_vllm_sampling(request.sampling),
        **_bias(request),
    }


def _bias(request: RoundRequest) -> dict[str, Any]:
    """Of an excluded token: its probability times exp(-100), the least that both servers take."""
    return {} if request.excluded is None else {"logit_bias": {str(request.excluded): -100}}


def _vllm_score(request: RoundRequest) -> dict[str, Any]:
    return {**_vllm_sample(request), "prompt_logprobs": TOP}


def _choice(answer: Json) -> Json:
    return json_object(only(json_list(answer, "choices"), "choices"), "a choice")


def _chosen_tokens(request: RoundRequest, answer: Json) -> Sampled:
    choice = _choice(answer)
    tokens = token_ids(choice, "token_ids", request.num_tokens)
    return Sampled(tokens, choice.get("finish_reason") == "stop")


def _chosen_event(request: RoundRequest, event: Json, num_before: int) -> Sampled:
    """Of vLLM's streams and ours; the last event may have usage alone."""
    if not json_list(event, "choices"):
        return Sampled((), has_ended=False)
    choice = _choice(event)
    tokens = choice.get("token_ids")
    has_ended = choice.get("finish_reason") == "stop"
    if not tokens:
        return Sampled((), has_ended)
    return Sampled(token_ids(choice, "token_ids", request.num_tokens - num_before), has_ended)


def _vllm_scores(request: RoundRequest, answer: Json) -> Scores:
    rows = json_list(_choice(answer), "prompt_logprobs")
    if len(rows) != len(request.tokens):
        raise UpstreamAnswerInvalid(f"{len(rows)} prompt_logprobs for {len(request.tokens)} tokens")
    return _vllm_last(request, rows, answer)


def _vllm_last(
    request: RoundRequest,
    rows: list[Any],
    answer: Json,
    num_missing: int = 0,
    num_cached: int = 0,
) -> Scores:
    """Of the drafted tokens but the first num_missing, which the last rows are about."""
    drafted = request.drafted[num_missing:]
    drafted_rows = rows[len(rows) - len(drafted) :]
    scored = [_vllm_row(token, row) for token, row in zip(drafted, drafted_rows, strict=True)]
    return Scores(tuple(scored), _chosen_tokens(request, answer), num_missing, num_cached)


def _vllm_cached_score(request: RoundRequest) -> dict[str, Any]:
    sampling_params = {
        "max_tokens": request.num_tokens,
        "prompt_logprobs": TOP,
        "skip_reading_prefix_cache": False,
        # It would look up what is no token.
        "detokenize": False,
        **_vllm_sampling(request.sampling),
    }
    return {"token_ids": request.tokens, "sampling_params": sampling_params}


def _vllm_cached_scores(request: RoundRequest, answer: Json) -> Scores:
    usage = json_object(answer.get("usage"), "usage")
    details = json_object(usage.get("prompt_tokens_details"), "prompt_tokens_details")
    num_cached, num_tokens = details.get("cached_tokens"), len(request.tokens)
    if not isinstance(num_cached, int) or not 0 <= num_cached < num_tokens:
        raise UpstreamAnswerInvalid(f"{str(num_cached)[:50]} cached tokens of {num_tokens}")
    # The first computed token says what comes after it, not how likely it was itself.
    num_missing = min(max(0, num_cached + 1 - len(request.prompt)), len(request.drafted))
    rows, num_scored = json_list(answer, "prompt_logprobs"), len(request.drafted) - num_missing
    if len(rows) < num_scored:
        raise UpstreamAnswerInvalid(f"{len(rows)} prompt_logprobs for {num_scored} tokens")
    return _vllm_last(request, rows, answer, num_missing, num_cached)


def _vllm_row(drafted: int, row: object) -> ScoredToken:
    logprobs: dict[int, float] = {}
    for token, entry in json_object(row, "a place of prompt_logprobs").items():
        value = entry.get("logprob") if isinstance(entry, Mapping) else None
        text = str(token)[:20]
        is_number = text.isascii() and text.isdecimal()
        logprobs[token_id(int(text) if is_number else None)] = log_probability(value)
    if drafted not in logprobs:
        raise UpstreamAnswerInvalid(f"prompt_logprobs do not have token {drafted} at its place")
    return ScoredToken(logprobs[drafted], likeliest(logprobs))


# ---- SGLang: /generate, which takes and gives tokens


def _sglang_sample(request: RoundRequest) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "input_ids": request.tokens,
        "sampling_params": {
            "temperature": sampling.temperature,
            "max_new_tokens": request.num_tokens,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            **({} if sampling.seed is None else {"sampling_seed": sampling.seed}),
            **_bias(request),
        },
    }


def _sglang_score(request: RoundRequest) -> dict[str, Any]:
    return {
        **_sglang_sample(request),
        "return_logprob": True,
        # Places before it may come from its cache; the one before the draft predicts its first.
        "logprob_start_len": len(request.prompt) - 1,
        "top_logprobs_num": TOP,
    }


def _sglang_tokens(request: RoundRequest, answer: Json) -> Sampled:
    reason = json_object(answer.get("meta_info"), "meta_info").get("finish_reason")
    tokens = token_ids(answer, "output_ids", request.num_tokens)
    return Sampled(tokens, isinstance(reason, Mapping) and reason.get("type") == "stop")


def _sglang_event(request: RoundRequest, event: Json, num_before: int) -> Sampled:
    """output_ids are all so far, or with --stream-output the new ones: how many there are in all
    says which are new."""
    meta = json_object(event.get("meta_info"), "meta_info")
    num, reason = meta.get("completion_tokens"), meta.get("finish_reason")
    has_ended = isinstance(reason, Mapping) and reason.get("type") == "stop"
    if not isinstance(num, int) or not num_before <= num <= request.num_tokens:
        raise UpstreamAnswerInvalid(f"{str(num)[:50]} tokens after {num_before}")
    if num == num_before:
        return Sampled((), has_ended)
    tokens = token_ids(event, "output_ids", num)
    if len(tokens) < num - num_before:
        raise UpstreamAnswerInvalid(f"output_ids lack some of {num - num_before} new tokens")
    return Sampled(tokens[num_before - num :], has_ended)


def _sglang_scores(request: RoundRequest, answer: Json) -> Scores:
    meta = json_object(answer.get("meta_info"), "meta_info")
    num_drafted = len(request.drafted)
    own, top = json_list(meta, "input_token_logprobs"), json_list(meta, "input_top_logprobs")
    if min(len(own), len(top)) < num_drafted:
        raise UpstreamAnswerInvalid(
            f"{min(len(own), len(top))} scored places for {num_drafted} tokens"
        )
    own, top = own[len(own) - num_drafted :], top[len(top) - num_drafted :]
    scored = [_sglang_place(*place) for place in zip(request.drafted, own, top, strict=True)]
    return Scores(tuple(scored), _sglang_tokens(request, answer))


def _sglang_place(drafted: int, own: object, top: object) -> ScoredToken:
    token, logprob = _sglang_pair(own)
    if token != drafted:
        raise UpstreamAnswerInvalid(f"token {token} is scored in place of {drafted}")
    if not isinstance(top, list) or not top:
        raise UpstreamAnswerInvalid("input_top_logprobs has a place without tokens")
    return ScoredToken(logprob, likeliest(dict([(token, logprob), *map(_sglang_pair, top)])))


def _sglang_pair(entry: object) -> tuple[int, float]:
    if not isinstance(entry, list) or len(entry) < 2:
        raise UpstreamAnswerInvalid("a scored place is not a log-probability and a token")
    return token_id(entry[1]), log_probability(entry[0])


# ---- our own server


def _own_fields(request: RoundRequest) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        **({} if sampling.seed is None else {"seed": sampling.seed}),
    }


def _own_sample(request: RoundRequest) -> dict[str, Any]:
    fields = {"prompt": request.tokens, "max_tokens": request.num_tokens, "return_token_ids": True}
    return _own_fields(request) | fields


def _own_verify(request: RoundRequest) -> dict[str, Any]:
    return _own_fields(request) | {"prompt": [*request.prompt], "drafted": [*request.drafted]}


def _own_verified(request: RoundRequest, answer: Json) -> Verified:
    tokens = token_ids(answer, "tokens", len(request.drafted) + 1)
    if tokens[:-1] != request.drafted[: len(tokens) - 1]:
        raise UpstreamAnswerInvalid("the verified tokens do not begin with drafted ones")
    logprobs = tuple(map(log_probability, json_list(answer, "logprobs")))
    if len(logprobs) != len(tokens):
        raise UpstreamAnswerInvalid(f"{len(logprobs)} log-probabilities for {len(tokens)} tokens")
    is_drafted = tokens == request.drafted[: len(tokens)]
    num_accepted = len(tokens) if is_drafted else len(tokens) - 1
    return Verified(tokens, num_accepted, answer.get("finish_reason") == "stop")


_VLLM_SAMPLE = SampleForm("completions", _vllm_sample, _chosen_tokens, _chosen_event)
_VLLM_SCORE = ScoreForm("completions", _vllm_score, _vllm_scores)
VLLM_CACHED_SCORE = ScoreForm(
    "/inference/v1/generate", _vllm_cached_score, _vllm_cached_scores, skips_cached=True
)

SERVER_KINDS: Mapping[str, ServerKind] = {
    "tinkercloud": ServerKind(
        "tinkercloud",
        SampleForm("completions", _own_sample, _chosen_tokens, _chosen_event),
        VerifyForm("verify", _own_verify, _own_verified),
        is_seeded=True,
    ),
    "vllm": ServerKind("vllm", _VLLM_SAMPLE, _VLLM_SCORE, computes_prompt=True),
    # Started with --enable-scale-out and --enable-prompt-tokens-details.
    "vllm-cached": ServerKind(
        "vllm-cached",
        _VLLM_SAMPLE,
        VLLM_CACHED_SCORE,
    ),
    "sglang": ServerKind(
        "sglang",
        SampleForm(SGLANG_PATH, _sglang_sample, _sglang_tokens, _sglang_event),
        ScoreForm(SGLANG_PATH, _sglang_score, _sglang_scores),
    ),
}
