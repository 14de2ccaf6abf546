"""From OpenAI's bodies to our requests; every refusal names its field."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tinkercloud.chat.requests import (
    ANY_OBJECT,
    ChatRequest,
    CompletionRequest,
    SamplingOptions,
    json_grammar,
    tool_names,
)
from tinkercloud.chat.text_model import Conversation
from tinkercloud.core.types import Grammar
from tinkercloud.errors import InvalidField
from tinkercloud.openai_api.bodies import (
    MAX_CHOICES,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    ChatBody,
    CompletionBody,
    SampledBody,
)
from tinkercloud.openai_api.messages import template_messages, template_tools

DEFAULT_COMPLETION_TOKENS = 16  # of OpenAI's reference


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What of an answer the client wants to see. top_logprobs: how many alternatives of a token
    its log-probabilities show."""

    stream: bool
    usage: bool  # in a stream: a last chunk with the counts
    logprobs: bool
    top_logprobs: int
    token_ids: bool


def chat_request(body: ChatBody) -> ChatRequest:
    """Raises InvalidField."""
    body.refuse_unsupported()
    if body.modalities not in (None, ["text"]):
        raise InvalidField("modalities", "modalities may be ['text'] only; no audio is made here")
    grammar = _grammar(body.response_format)
    tools = template_tools(body.tools or ())
    forced = _forced_tools(body.tool_choice, tools)
    if body.tool_choice == "none":
        tools = ()
    if grammar is not None and tools:
        text = "response_format is not served with tools; send tool_choice 'none', or one of both"
        raise InvalidField("response_format", text)
    conversation = Conversation(
        template_messages(body.messages),
        tools,
        continue_final_message=bool(body.continue_final_message),
        options=_template_options(body),
    )
    max_tokens = body.max_completion_tokens or body.max_tokens
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else 0
    sampling = replace(_sampling(body, max_tokens, top_logprobs), logprobs=bool(body.logprobs))
    return ChatRequest(
        *(body.model, conversation, sampling),
        one_call=body.parallel_tool_calls is False,
        forced_tools=forced,
        grammar=grammar,
    )


def chat_form(body: ChatBody) -> AnswerForm:
    return _form(body, logprobs=bool(body.logprobs), top_logprobs=body.top_logprobs or 0)


def completion_form(body: CompletionBody) -> AnswerForm:
    return _form(body, logprobs=body.logprobs is not None, top_logprobs=body.logprobs or 0)


def completion_request(body: CompletionBody) -> CompletionRequest:
    """Raises InvalidField."""
    body.refuse_unsupported()
    if body.best_of not in (None, body.n or 1):
        raise InvalidField("best_of", "best_of is not served here; send n, and choose yourself")
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise InvalidField("max_tokens", "max_tokens is 0, which needs echo; send 1 or more")
    prompts = _prompts(body.prompt)
    if len(prompts) * (body.n or 1) > MAX_CHOICES:
        raise InvalidField("prompt", f"prompts times n may be {MAX_CHOICES} at most; send fewer")
    sampling = _sampling(body, max_tokens, body.logprobs or 0)
    sampling = replace(sampling, logprobs=body.logprobs is not None)
    return CompletionRequest(body.model, prompts, sampling, echo=bool(body.echo))


def _sampling(body: SampledBody, max_tokens: int | None, top_logprobs: int) -> SamplingOptions:
    return SamplingOptions(
        num_samples=body.n or 1,
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or -1,  # 0 means no limit to vLLM's clients
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        seed=body.seed,
        stops=_stops(body.stop),
        top_logprobs=top_logprobs,
    )


def _form(body: SampledBody, *, logprobs: bool, top_logprobs: int) -> AnswerForm:
    options = body.stream_options
    return AnswerForm(
        stream=bool(body.stream),
        usage=options is not None and options.include_usage,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        token_ids=bool(body.return_token_ids),
    )


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS or any(not 1 <= len(s) <= MAX_STOP_CHARACTERS for s in stops):
        raise InvalidField(
            "stop", f"stop takes up to {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters"
        )
    return stops


def _prompts(prompt: Any) -> tuple[str | tuple[int, ...], ...]:
    """One prompt, or a list of them, each a text or token ids."""
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise InvalidField("prompt", "prompt is empty; send a text or token ids")
    if isinstance(prompt[0], int):
        return (tuple(prompt),)
    return tuple(item if isinstance(item, str) else tuple(item) for item in prompt)


def _grammar(form: dict[str, Any] | None) -> Grammar | None:
    match None if form is None else form.get("type"):
        case None | "text":
            return None
        case "json_object":
            return ANY_OBJECT
        case "json_schema":
            described = (form or {}).get("json_schema")
            schema = described.get("schema") if isinstance(described, dict) else None
            if not isinstance(schema, dict):
                field = "response_format.json_schema.schema"
                raise InvalidField(field, f"{field} must be a JSON schema")
            return json_grammar(schema)
        case kind:
            text = f"response_format is of type {kind!r}; it may be text, json_object, json_schema"
            raise InvalidField("response_format", text)


def _forced_tools(
    choice: str | dict[str, Any] | None, tools: tuple[Mapping[str, Any], ...]
) -> tuple[Mapping[str, Any], ...]:
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required" and tools:
        return tools
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    named = tuple(tool for tool in tools if tool["function"]["name"] == name)
    if not named:
        raise InvalidField(
            "tool_choice",
            "tool_choice may be 'auto', 'none', 'required', or a function of tools by its name; "
            f"tools: {tool_names(tools)}",
        )
    return named[:1]


def _template_options(body: ChatBody) -> Mapping[str, Any]:
    """reasoning_effort goes to the template too; those of Qwen know but whether to think."""
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
        options.setdefault("enable_thinking", body.reasoning_effort != "none")
    return options
