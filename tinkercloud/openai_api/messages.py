"""Messages and tools of OpenAI's API, in the form that chat templates take."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tinkercloud.chat.template import Message
from tinkercloud.errors import InvalidField

_ROLES = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name for it
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
MAX_NAME_CHARACTERS = 256


def template_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Raises InvalidField, with the message's place."""
    return tuple(_message(f"messages.{i}", message) for i, message in enumerate(messages))


def _message(where: str, message: Mapping[str, Any]) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        roles = ", ".join(_ROLES)
        raise InvalidField(f"{where}.role", f"{where}.role is {role!r}; it may be {roles}")
    result: dict[str, Any] = {"role": _ROLES[role]}
    result["content"] = _text(f"{where}.content", message.get("content"))
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(name), str):
            result[name] = message[name]
    calls = message.get("tool_calls")
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            text = f"{where}.tool_calls is a list in a message of the assistant"
            raise InvalidField(f"{where}.tool_calls", text)
        result["tool_calls"] = [
            _call(f"{where}.tool_calls.{i}", call) for i, call in enumerate(calls)
        ]
    return result


def _text(where: str, content: object) -> str:
    """Content parts are joined by line breaks, as vLLM does for models that take text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidField(where, f"{where} must be a text or a list of parts")
    return "\n".join(_part_texts(where, content))


def _part_texts(where: str, parts: list[Any]) -> Iterator[str]:
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part
        if kind is not None:
            text = part.get("refusal" if kind == "refusal" else "text")
        if kind not in (None, "text", "refusal") or not isinstance(text, str):
            raise InvalidField(
                f"{where}.{i}",
                f"{where}.{i} is of type {kind!r}; the models here take text only: send a part "
                "of type 'text'",
            )
        yield text


def _call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidField(where, f"{where} must have a function with a name and arguments")
    assert isinstance(call, dict)
    arguments = parsed_arguments(function.get("arguments"))
    described = {"name": function["name"], "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": described}


def parsed_arguments(written: object) -> object:
    """Templates take an object; a model's text that is none stays a text."""
    if not isinstance(written, str):
        return {} if written is None else written
    try:
        value = json.loads(written or "{}")
    except (ValueError, RecursionError):
        return written
    return value if isinstance(value, dict) else written


def template_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Raises InvalidField."""
    return tuple(_tool(f"tools.{i}", tool) for i, tool in enumerate(tools))


def _tool(where: str, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if tool.get("type") == "function" and not isinstance(function, dict):
        raise InvalidField(f"{where}.function", f"{where}.function must be an object with a name")
    if tool.get("type") != "function" or not isinstance(function, dict):
        text = f"{where} must be of type 'function'; other tools run at OpenAI's and not here"
        raise InvalidField(where, text)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARACTERS:
        raise InvalidField(f"{where}.function.name", f"{where}.function.name must be a text")
    if parameters is not None and not isinstance(parameters, dict):
        field = f"{where}.function.parameters"
        raise InvalidField(field, f"{field} must be a JSON schema")
    return {"type": "function", "function": function}
