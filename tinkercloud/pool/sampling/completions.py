"""What llama-server is asked for some tokens of a sample, and what its answers say.

llama-server gives no log-probability of a token with which a character is still incomplete, nor of
one that it has drafted itself: those are NaN.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinkercloud.core.types import SamplingParams
from tinkercloud.decoding.distribution import Floats
from tinkercloud.errors import UpstreamAnswerInvalid

Json = dict[str, Any]
SAMPLERS = ("temperature", "top_k", "top_p", "min_p")
"""In the order that the server's own models apply them in; llama.cpp knows more, none of which is
used."""
MAX_SEED = 2**31
FORCING = 1e6  # beyond every difference of logits
MAX_CHARACTER_BYTES = 4
# bytes of a character: how its first byte begins
_STARTS = (
    (2, 0b1110_0000, 0b1100_0000),
    (3, 0b1111_0000, 0b1110_0000),
    (4, 0b1111_1000, 0b1111_0000),
)


@dataclass(frozen=True, slots=True)
class Drawn:
    """tokens, with their log-probabilities under the distribution that they were drawn from, and
    the likeliest ones of their places. has_ended: llama.cpp takes the last token for an end."""

    tokens: list[int]
    logprobs: list[float]
    tops: list[list[tuple[int, float]]]
    has_ended: bool


def completion_body(
    tokens: Sequence[int], num_tokens: int, params: SamplingParams, seed: int, top: int
) -> Json:
    """For num_tokens after `tokens`. top: likeliest ones that are wanted of each place."""
    is_greedy = params.temperature == 0
    return {
        "prompt": [*tokens],
        "n_predict": num_tokens,
        "return_tokens": True,
        "stream": False,
        "samplers": [*SAMPLERS],
        "temperature": params.temperature,
        "top_k": 0 if is_greedy else max(params.top_k, 0),
        "top_p": 1.0 if is_greedy else params.top_p,
        "min_p": 0.0 if is_greedy else params.min_p,
        "seed": seed,
        "n_probs": max(top, 1),
        # Of what samplers left; of a greedy sample it would say 1.
        "post_sampling_probs": not is_greedy,
    }


def draw_seed(seed: int, index: int, position: int) -> int:
    """Of a request for the tokens of one sample from a position on."""
    digest = hashlib.sha256(f"{seed} {index} {position}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % MAX_SEED


def scoring_body(tokens: Sequence[int], forced: int, num_tokens: int) -> Json:
    """For the model's own log-probabilities of all its num_tokens tokens after `tokens`. forced: a
    token whose text is whole, without which llama-server would not tell them."""
    return {
        "prompt": [*tokens],
        "n_predict": 1,
        "stream": False,
        "samplers": [],
        "logit_bias": [[forced, FORCING]],
        "cache_prompt": True,
        "n_probs": num_tokens,
        "post_sampling_probs": False,
    }


def read_scores(answer: Json, num_tokens: int) -> Floats:
    """(V,) log-probabilities of the model. Raises UpstreamAnswerInvalid."""
    entries = answer.get("completion_probabilities") or [{}]
    scores = np.full(num_tokens, -np.inf)
    top = _top(entries[0])
    if len(top) != num_tokens:
        raise UpstreamAnswerInvalid(f"llama-server scores {len(top)} tokens of {num_tokens}")
    for entry in top:
        scores[int(entry["id"])] = _logprob(entry)
    return scores


def read_completion(answer: Json, bytes_of: Callable[[int], bytes], num_tokens: int) -> Drawn:
    """Raises UpstreamAnswerInvalid."""
    tokens = answer.get("tokens")
    if not isinstance(tokens, list) or not 1 <= len(tokens) <= num_tokens:
        raise UpstreamAnswerInvalid(f"llama-server gives no list of 1 to {num_tokens} tokens")
    if not all(isinstance(token, int) and token >= 0 for token in tokens):
        raise UpstreamAnswerInvalid("llama-server gives tokens that are no numbers")
    entries = iter(answer.get("completion_probabilities") or ())
    logprobs: list[float] = []
    tops: list[list[tuple[int, float]]] = []
    for token, is_scored in zip(tokens, _whole(map(bytes_of, tokens)), strict=True):
        entry = next(entries, None) if is_scored else {}
        if entry is None or (entry and entry.get("id") != token):
            raise UpstreamAnswerInvalid("llama-server's log-probabilities are of other tokens")
        top = [(int(each["id"]), _logprob(each)) for each in _top(entry)]
        logprobs.append(_logprob(entry) if top else math.nan)
        tops.append(top)
    return Drawn(tokens, logprobs, tops, answer.get("stop_type") == "eos")


def _top(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Empty where the token was drafted."""
    return entry.get("top_probs") or entry.get("top_logprobs") or []


def _logprob(entry: Mapping[str, Any]) -> float:
    probability = entry.get("prob")
    if probability is None:
        return float(entry.get("logprob", math.nan))
    return math.log(probability) if probability > 0 else -math.inf


def _whole(pieces: Iterator[bytes]) -> Iterator[bool]:
    """Whether a text ends with a whole character after each of its pieces."""
    text = b""
    for piece in pieces:
        text = (text + piece)[-MAX_CHARACTER_BYTES:]
        yield not _is_cut(text)


def _is_cut(text: bytes) -> bool:
    """As llama-server sees it."""
    return any(
        byte & mask == start and place < length
        for place, byte in enumerate(reversed(text), start=1)
        for length, mask, start in _STARTS
    )
