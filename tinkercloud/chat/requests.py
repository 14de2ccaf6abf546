"""What the OpenAI and Anthropic routes ask for, in one form for both."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinkercloud.chat.text_model import Conversation
from tinkercloud.core.types import Grammar

DEFAULT_TEMPERATURE = 1.0
MAX_NAMED_TOOLS = 16


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """num_samples: answers to one prompt. max_tokens None: up to the context's end. seed None: a
    drawn one. logprobs: whether those of the samples are reported. top_logprobs: how many of the
    likeliest tokens are, at each place."""

    num_samples: int = 1
    max_tokens: int | None = None
    temperature: float = DEFAULT_TEMPERATURE
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stops: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0


ANY_OBJECT = Grammar("json_schema", '{"type": "object"}')


def json_grammar(schema: Mapping[str, Any]) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """model: a name as `services.model_names` resolves it. one_call: at most one tool call.
    forced_tools: the answer is a call of one of these. grammar: what the answer must be; not with
    forced_tools."""

    model: str
    conversation: Conversation
    sampling: SamplingOptions = SamplingOptions()
    one_call: bool = False
    forced_tools: tuple[Mapping[str, Any], ...] = ()
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """prompts: texts, or lists of token ids. echo: the prompt's text comes first."""

    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    sampling: SamplingOptions = SamplingOptions()
    echo: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens. cached: those of the prompt that were computed for an earlier request."""

    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DraftedPrompt:
    """drafted: tokens that may come after the prompt, which is a text or token ids."""

    model: str
    prompt: str | tuple[int, ...]
    drafted: tuple[int, ...]
    sampling: SamplingOptions


@dataclass(frozen=True, slots=True)
class Verification:
    """tokens: the accepted ones, then the model's own after them, but where an accepted one stops.
    logprobs: of tokens, under the distribution that each was drawn from. has_ended: with an
    end-of-sequence token."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_accepted: int
    has_ended: bool
    usage: Usage


def tool_names(tools: Sequence[Mapping[str, Any]]) -> str:
    """For a refusal; a client may send hundreds."""
    names = [tool["function"]["name"] for tool in tools[:MAX_NAMED_TOOLS]]
    more = ["..."] if len(tools) > MAX_NAMED_TOOLS else []
    return ", ".join(names + more) or "none, and without them no call is made"
