"""Parts of upstreams' answers, which are input from outside: what does not fit is refused."""

import json
import math
from collections.abc import Mapping
from typing import Any

from tinkercloud.errors import UpstreamAnswerInvalid

Json = Mapping[str, Any]


def json_object(value: object, what: str) -> Json:
    if not isinstance(value, Mapping):
        raise UpstreamAnswerInvalid(f"{what} is not an object")
    return value


def event_json(event: bytes) -> Json | None:
    """The body of a server-sent event; None: it has none, or is the last."""
    lines = [line for line in event.splitlines() if line.startswith(b"data:")]
    data = b"\n".join(line.removeprefix(b"data:").strip() for line in lines)
    if not data or data == b"[DONE]":
        return None
    try:
        body = json_object(json.loads(data), "an event")
    except (ValueError, RecursionError):
        raise UpstreamAnswerInvalid("an event is no JSON") from None
    if "error" in body:
        raise UpstreamAnswerInvalid(f"the stream ended with {str(body['error'])[:200]}")
    return body


def json_list(answer: Json, name: str) -> list[Any]:
    value = answer.get(name)
    if not isinstance(value, list):
        raise UpstreamAnswerInvalid(f"the answer has no list {name}")
    return value


def only(values: list[Any], name: str) -> Any:
    if len(values) != 1:
        raise UpstreamAnswerInvalid(f"{name} has {len(values)} entries; one was asked for")
    return values[0]


def token_id(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise UpstreamAnswerInvalid(f"{str(value)[:50]!r} is no token")
    return value


def token_ids(answer: Json, name: str, num_tokens: int) -> tuple[int, ...]:
    """At least one, and at most num_tokens."""
    tokens = tuple(map(token_id, json_list(answer, name)))
    if not 1 <= len(tokens) <= num_tokens:
        raise UpstreamAnswerInvalid(f"{name} has {len(tokens)} tokens; {num_tokens} were asked for")
    return tokens


def log_probability(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not -math.inf <= value < 1:
        raise UpstreamAnswerInvalid(f"{str(value)[:50]!r} is no log-probability")
    return float(value)


def likeliest(logprobs: Mapping[int, float]) -> int | None:
    """None: two are."""
    most = max(logprobs.values())
    best = [token for token, logprob in logprobs.items() if logprob == most]
    return best[0] if len(best) == 1 else None
