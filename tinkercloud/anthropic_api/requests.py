"""From Anthropic's bodies to our requests; every refusal names its field."""

from collections.abc import Mapping
from typing import Any

from tinkercloud.anthropic_api.bodies import MAX_STOP_CHARACTERS, CountBody, MessagesBody
from tinkercloud.anthropic_api.messages import template_messages, template_tools
from tinkercloud.chat.requests import ChatRequest, SamplingOptions, json_grammar, tool_names
from tinkercloud.chat.text_model import Conversation
from tinkercloud.core.types import Grammar
from tinkercloud.errors import InvalidField

Tool = Mapping[str, Any]


def chat_request(body: MessagesBody) -> ChatRequest:
    """Raises InvalidField."""
    stops = tuple(body.stop_sequences or ())
    if any(not 1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        text = f"stop_sequences has a text that is empty or longer than {MAX_STOP_CHARACTERS}"
        raise InvalidField("stop_sequences", text)
    sampling = SamplingOptions(
        max_tokens=body.max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or -1,
        seed=body.seed,
        stops=stops,
    )
    messages = conversation(body)
    forced = _forced_tools(body.tool_choice or {}, messages.tools)
    grammar = _grammar(body.output_config or {})
    if grammar is not None and messages.tools:
        text = "output_config.format is not served with tools; send one of both"
        raise InvalidField("output_config", text)
    return ChatRequest(
        *(body.model, messages, sampling),
        one_call=bool((body.tool_choice or {}).get("disable_parallel_tool_use")),
        forced_tools=forced,
        grammar=grammar,
    )


def count_request(body: CountBody) -> ChatRequest:
    """Raises InvalidField."""
    return ChatRequest(body.model, conversation(body))


def conversation(body: CountBody) -> Conversation:
    """An assistant's message at the end is continued, as with Anthropic."""
    body.refuse_unsupported()
    messages = template_messages(body.messages, body.system)
    tools = template_tools(body.tools or ())
    if (body.tool_choice or {}).get("type") == "none":
        tools = ()
    last = messages[-1]
    continues = last["role"] == "assistant" and "tool_calls" not in last
    return Conversation(messages, tools, continues, _thinking_options(body.thinking))


def _forced_tools(choice: Mapping[str, Any], tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    kind = choice.get("type", "auto")
    if kind in ("auto", "none"):
        return ()
    if kind == "any" and tools:
        return tools
    named = tuple(tool for tool in tools if tool["function"]["name"] == choice.get("name"))
    if kind != "tool" or not named:
        text = (
            "tool_choice may be of type 'auto', 'any', 'none', or 'tool' with the name of a tool; "
            f"tools: {tool_names(tools)}"
        )
        raise InvalidField("tool_choice", text)
    return named[:1]


def _grammar(config: Mapping[str, Any]) -> Grammar | None:
    form = config.get("format")
    if form is None:
        return None
    schema = form.get("schema") if isinstance(form, dict) else None
    if not isinstance(schema, dict) or form.get("type") != "json_schema":
        text = "output_config.format must be of type 'json_schema' and have a schema"
        raise InvalidField("output_config", text)
    return json_grammar(schema)


def _thinking_options(thinking: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """By the variable of Qwen's templates; others do not read it."""
    kind = None if thinking is None else thinking.get("type")
    return {} if kind is None else {"enable_thinking": kind != "disabled"}
