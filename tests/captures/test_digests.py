"""Which requests repeat a conversation that was answered."""

from typing import Any

import pytest

from tinkercloud.captures.digests import next_digest, prefix_digests, same_calls
from tinkercloud.chat.text_model import Conversation

USER = {"role": "user", "content": "What is 1 + 2?"}
ANSWER = {"role": "assistant", "content": "Let me see."}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a":1,"b":2}'},
}


def digests(
    messages: list[Any], place: tuple[str | None, ...] = ("m",), **fields: Any
) -> list[str]:
    return prefix_digests(Conversation(tuple(messages), **fields), place)


def test_an_answered_conversation_is_the_beginning_of_the_next():
    first = digests([USER])
    second = digests([USER, ANSWER, USER])
    assert second[:2] == first
    assert second[2] == next_digest(first[-1], ANSWER)


@pytest.mark.parametrize(
    "repeated",
    [
        {"role": "assistant", "content": " Let me see.\n", "tool_calls": [CALL]},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "hm"},
        {"content": "Let me see.", "name": "me", "id": "call_9", "arguments": {"b": 2, "a": 1}},
    ],
    ids=["blanks", "reasoning", "ids"],
)
def test_what_client_libraries_change_is_no_other_conversation(repeated: dict[str, Any]):
    call = {**CALL, "id": repeated.pop("id", "call_1")}
    call["function"] = {"name": "add", "arguments": repeated.pop("arguments", {"a": 1, "b": 2})}
    repeated = {**repeated, "role": "assistant", "tool_calls": [call]}
    answered = {**ANSWER, "tool_calls": [CALL]}
    assert next_digest("d", repeated) == next_digest("d", answered)


@pytest.mark.parametrize(
    "other",
    [
        {"role": "assistant", "content": "Let me look."},
        {"role": "user", "content": "Let me see."},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
    ],
    ids=["text", "role", "call"],
)
def test_another_message_is_another_conversation(other: dict[str, Any]):
    assert next_digest("d", ANSWER) != next_digest("d", other)


def test_tools_options_and_place_are_part_of_a_conversation():
    tools = ({"type": "function", "function": {"name": "add"}},)
    ends = {
        digests([USER])[-1],
        digests([USER], tools=tools)[-1],
        digests([USER], options={"enable_thinking": False})[-1],
        digests([USER], ("m", "episode"))[-1],
        digests([USER], ("other",))[-1],
    }
    assert len(ends) == 5


def test_calls_are_told_apart_by_their_ids():
    answered = {**ANSWER, "tool_calls": [CALL]}
    other = {**ANSWER, "tool_calls": [{**CALL, "id": "call_2"}]}
    assert same_calls(answered, dict(answered))
    assert not same_calls(answered, other)
