"""How many tokens an answer has that is passed on."""

import json
from collections.abc import Mapping
from typing import Any


def num_tokens(answer: object) -> int:
    """By its usage; 0 where it has none."""
    usage = answer.get("usage") if isinstance(answer, Mapping) else None
    num = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    return num if isinstance(num, int) and num > 0 else 0


class StreamedTokens:
    """Of a stream: an event with a text is one token until its usage, which most streams do not
    have, tells how many there are."""

    def __init__(self) -> None:
        self._num = 0

    def add(self, event: bytes) -> int:
        """How many more they are with it."""
        answer, before = _data(event), self._num
        self._num = max(before, num_tokens(answer) or before + _has_text(answer))
        return self._num - before


def _data(event: bytes) -> object:
    try:
        return json.loads(event.removeprefix(b"data:"))
    except (ValueError, RecursionError):
        return None


def _has_text(answer: object) -> bool:
    choices: Any = answer.get("choices") if isinstance(answer, Mapping) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, Mapping):
        return False
    delta = choice.get("delta")
    fields = delta if isinstance(delta, Mapping) else choice
    return any(fields.get(name) for name in ("text", "content", "reasoning_content", "tool_calls"))
