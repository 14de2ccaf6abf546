"""Tokens of answers that are passed on, as servers tell of them."""

import json
from typing import Any

import pytest

from tinkercloud.proxy.passed_tokens import StreamedTokens, num_tokens


def streamed(*events: Any) -> int:
    counter = StreamedTokens()
    lines = [b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) for e in events]
    return sum(counter.add(line + b"\n\n") for line in lines)


def delta(**fields: Any) -> Any:
    return {"choices": [{"delta": fields}]}


@pytest.mark.parametrize(
    ("answer", "num"),
    [
        ({"usage": {"completion_tokens": 7}}, 7),
        ({"usage": {"completion_tokens": -7}}, 0),
        ({"usage": {"completion_tokens": "7"}}, 0),
        ({"usage": None}, 0),
        ({}, 0),
        ([], 0),
    ],
)
def test_a_whole_answer_has_those_of_its_usage(answer: Any, num: int) -> None:
    assert num_tokens(answer) == num


def test_a_stream_without_usage_has_its_events_with_text() -> None:
    opening, end = delta(role="assistant", content=""), delta()
    thought, said = delta(reasoning_content="a"), delta(content="b")
    assert streamed(opening, thought, said, {"choices": [{"text": "c"}]}, end, b"[DONE]") == 3


def test_usage_at_the_end_counts_for_all() -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 5}}
    assert streamed(delta(content="a b"), delta(content="c d e"), usage, b"[DONE]") == 5
    assert streamed(*[delta(content="a")] * 7, usage) == 7  # what was counted stays counted


def test_what_is_no_event_of_openai_counts_nothing() -> None:
    assert streamed(b"{", b"[" * 100_000, [], {"choices": [1]}, {"choices": {}}) == 0
