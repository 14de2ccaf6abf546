"""Messages and tools of Anthropic's API, in the form that chat templates take."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tinkercloud.chat.template import Message
from tinkercloud.errors import InvalidField

INVALID_JSON = "INVALID_JSON"
"""The key of what a model wrote as a tool's input where that is no JSON object, as
Anthropic's documentation of streamed tools proposes."""
MAX_NAME_CHARACTERS = 256
_KINDS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


def template_messages(
    messages: Sequence[Mapping[str, Any]], system: str | Sequence[Mapping[str, Any]] | None
) -> tuple[Message, ...]:
    """Raises InvalidField, with the message's place."""
    result: list[Message] = []
    if system:
        result.append({"role": "system", "content": _text("system", system)})
    for i, message in enumerate(messages):
        result += _messages(f"messages.{i}", message)
    return tuple(result)


def _messages(where: str, message: Mapping[str, Any]) -> Iterator[Message]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidField(f"{where}.role", f"{where}.role is {role!r}; it may be user, assistant")
    if role == "assistant":
        yield _assistant(where, content)
    elif isinstance(content, list):
        yield from _of_user(where, role, content)
    else:
        yield {"role": role, "content": _text(f"{where}.content", content)}


def _of_user(where: str, role: str, content: list[Any]) -> Iterator[Message]:
    """Results of tools are messages of their own to templates, in their order."""
    texts: list[str] = []
    for i, block in enumerate(content):
        place = f"{where}.content.{i}"
        if _kind(place, block) != "tool_result":
            texts.append(_block_text(place, block))
            continue
        if texts:
            yield {"role": role, "content": "\n".join(texts)}
            texts = []
        yield {
            "role": "tool",
            "tool_call_id": block.get("tool_use_id"),
            "content": _text(f"{place}.content", block.get("content")),
        }
    if texts or not content:
        yield {"role": role, "content": "\n".join(texts)}


def _assistant(where: str, content: object) -> Message:
    if not isinstance(content, list):
        return {"role": "assistant", "content": _text(f"{where}.content", content)}
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        place = f"{where}.content.{i}"
        match _kind(place, block):
            case "tool_use":
                calls.append(_call(place, block))
            case "thinking":
                reasoning.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                pass  # another provider's, encrypted
            case _:
                texts.append(_block_text(place, block))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if any(reasoning):
        message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(where: str, content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidField(where, f"{where} must be a text or a list of blocks")
    return "\n".join(_block_text(f"{where}.{i}", block) for i, block in enumerate(content))


def _kind(where: str, block: object) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in _KINDS:
        raise InvalidField(
            where,
            f"{where} is of type {kind!r}; the models here take text only: send a block of type "
            "'text'",
        )
    return kind


def _block_text(where: str, block: Any) -> str:
    text = block.get("text") if _kind(where, block) == "text" else None
    if not isinstance(text, str):
        raise InvalidField(where, f"{where} must be a block of type 'text' with a text")
    return text


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    name, value = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(value, dict):
        raise InvalidField(where, f"{where} must have a name and an input, which is an object")
    arguments = value[INVALID_JSON] if [*value] == [INVALID_JSON] else value
    function = {"name": name, "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def template_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Raises InvalidField."""
    return tuple(_tool(f"tools.{i}", tool) for i, tool in enumerate(tools))


def _tool(where: str, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    kind, name = tool.get("type"), tool.get("name")
    if kind not in (None, "custom"):
        text = (
            f"{where} is of type {kind!r}, which runs at Anthropic's; describe a tool of your own"
        )
        raise InvalidField(where, text)
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARACTERS:
        raise InvalidField(f"{where}.name", f"{where}.name must be a text")
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise InvalidField(f"{where}.input_schema", f"{where}.input_schema must be a JSON schema")
    function: dict[str, Any] = {"name": name}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function | {"parameters": schema}}
