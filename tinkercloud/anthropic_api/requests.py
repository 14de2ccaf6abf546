"""From Anthropic's bodies to our requests; every refusal names its field."""

from collections.abc import Mapping
from typing import Any

from tinkercloud.anthropic_api.bodies import MAX_STOP_CHARACTERS, CountBody, MessagesBody
from tinkercloud.anthropic_api.messages import template_messages, template_tools
from tinkercloud.chat.requests import ChatRequest, SamplingOptions
from tinkercloud.chat.text_model import Conversation
from tinkercloud.errors import InvalidField


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
    one_call = bool((body.tool_choice or {}).get("disable_parallel_tool_use"))
    return ChatRequest(body.model, conversation(body), sampling, one_call=one_call)


def count_request(body: CountBody) -> ChatRequest:
    """Raises InvalidField."""
    return ChatRequest(body.model, conversation(body))


def conversation(body: CountBody) -> Conversation:
    """An assistant's message at the end is continued, as with Anthropic."""
    body.refuse_unsupported()
    if body.output_config and body.output_config.get("format") is not None:
        text = "output_config.format is not served here yet; ask for JSON in the prompt"
        raise InvalidField("output_config", text)
    messages = template_messages(body.messages, body.system)
    tools = template_tools(body.tools or ())
    choice = (body.tool_choice or {}).get("type", "auto")
    if choice == "none":
        tools = ()
    elif choice != "auto":
        text = "tool_choice may be of type 'auto' or 'none' here; say in the prompt what to call"
        raise InvalidField("tool_choice", text)
    last = messages[-1]
    continues = last["role"] == "assistant" and "tool_calls" not in last
    return Conversation(messages, tools, continues, _thinking_options(body.thinking))


def _thinking_options(thinking: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """By the variable of Qwen's templates; others do not read it."""
    kind = None if thinking is None else thinking.get("type")
    return {} if kind is None else {"enable_thinking": kind != "disabled"}
