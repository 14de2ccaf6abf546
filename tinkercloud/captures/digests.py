"""Conversations by digest: whether a request goes on from a conversation that was answered.

Agents send the assistant's message back as their client library wrote it down: with other blanks
at its ends, arguments of calls as other JSON of the same value, without the reasoning. None of
that makes it another conversation. Ids of calls are left out too; where several answers match,
`same_calls` tells them apart.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tinkercloud.chat.text_model import Conversation

Message = Mapping[str, Any]


def prefix_digests(conversation: Conversation, place: Sequence[str | None]) -> list[str]:
    """[i] is that of the first i messages. place: what conversations must share besides: the base
    model, whose tokens they are, and the labels that the agent's requests carry."""
    beginning = [list(place), list(conversation.tools), dict(conversation.options)]
    digests = [_sha256(json.dumps(beginning, sort_keys=True))]
    for message in conversation.messages:
        digests.append(next_digest(digests[-1], message))
    return digests


def next_digest(digest: str, message: Message) -> str:
    """Of a conversation with one more message."""
    return _sha256(digest + json.dumps(_comparable(message), sort_keys=True))


def same_calls(message: Message, other: Message) -> bool:
    """Whether the tool calls of both have the same ids."""
    return _call_ids(message) == _call_ids(other)


def _comparable(message: Message) -> list[Any]:
    content = message.get("content") or ""
    text = content.strip() if isinstance(content, str) else content
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    named = [[function["name"], _arguments(function.get("arguments"))] for function in calls]
    return [message["role"], text, named]


def _arguments(written: object) -> object:
    """Of equal value where the JSON is: the text of an object is that object."""
    if not isinstance(written, str):
        return {} if written is None else written
    try:
        value = json.loads(written or "{}")
    except (ValueError, RecursionError):
        return written.strip()
    return value if isinstance(value, dict) else written.strip()


def _call_ids(message: Message) -> list[Any]:
    return [call.get("id") for call in message.get("tool_calls") or ()]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
