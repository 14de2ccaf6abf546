"""Tools for templates that have no place for them: in the system message, by Hermes' form.

The form is that of Nous Research's Hermes models and of Qwen's templates: tools as JSON between
<tools> tags, calls as JSON between <tool_call> tags, results between <tool_response> tags.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tinkercloud.chat.template import Message

_INTRODUCTION = """# Tools

You may call functions. Their signatures are between <tools> and </tools>:
<tools>
{signatures}
</tools>

To call one, answer with a JSON object of its name and its arguments between <tool_call> tags:
<tool_call>
{{"name": NAME, "arguments": ARGUMENTS}}
</tool_call>"""


def without_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> tuple[Message, ...]:
    """The same conversation for a template that knows neither tools nor their messages."""
    plain = list(_joined_results(_plain(message) for message in messages))
    if not tools:
        return tuple(plain)
    text = _INTRODUCTION.format(
        signatures="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    )
    if plain and plain[0].get("role") == "system":
        head = {**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}
        return (head, *plain[1:])
    return ({"role": "system", "content": text}, *plain)


def _plain(message: Message) -> Message:
    if message.get("role") == "tool":
        content = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
        return {"role": "user", "content": content, "is_result": True}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [message.get("content") or "", *(_call(call["function"]) for call in calls)]
    return {"role": "assistant", "content": "\n".join(text for text in texts if text)}


def _call(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    call = f'{{"name": {json.dumps(function["name"])}, "arguments": {written}}}'
    return f"<tool_call>\n{call}\n</tool_call>"


def _joined_results(messages: Iterator[Message]) -> Iterator[Message]:
    """Results that follow each other become one message: templates want the roles to alternate."""
    results: list[str] = []
    for message in messages:
        if message.get("is_result"):
            results.append(message["content"])
            continue
        if results:
            yield {"role": "user", "content": "\n".join(results)}
            results = []
        yield message
    if results:
        yield {"role": "user", "content": "\n".join(results)}
