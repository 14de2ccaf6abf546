"""Request bodies of OpenAI's API, field by field as its reference has them.

Fields that are not named here are ignored; those in `REFUSED` are known and refused where they
ask for something, since ignoring them would change what an answer means.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from tinkercloud.errors import InvalidField

MAX_MESSAGES = 4096
MAX_TOOLS = 256
MAX_CHOICES = 128
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 1024
MAX_TOP_LOGPROBS = 20
MAX_DRAFTED = 128

# field: values that ask for nothing, and what to do instead
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "repetition_penalty": ((None, 1), "use presence_penalty or frequency_penalty"),
    "logit_bias": ((None, {}), "use stop, tools or another prompt"),
    "functions": ((None, []), "use tools"),
    "function_call": ((None, "none"), "use tool_choice"),
    "audio": ((None,), "send and ask for text"),
    "web_search_options": ((None,), "describe a tool of your own in tools"),
    "chat_template": ((None,), "serve the model with that template in its folder"),
    "suffix": ((None, ""), "put the text around the gap into prompt"),
}


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    def refuse_unsupported(self) -> None:
        """Raises InvalidField for a field that is known and not served."""
        for name, (harmless, remedy) in REFUSED.items():
            value = (self.model_extra or {}).get(name)
            if value not in harmless:
                raise InvalidField(name, f"{name} is not served here; {remedy}")


class StreamOptions(BaseModel):
    include_usage: bool = False


class SampledBody(Body):
    """What chats and completions share."""

    model: str = Field(max_length=4096)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class ChatBody(SampledBody):
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(SampledBody):
    prompt: str | list[str] | list[int] | list[list[int]] = ""
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = None


class TrainDraftBody(Body):
    model: str = Field(max_length=4096)


class VerifyBody(Body):
    """OpenAI's API has no such request; fields that it shares with completions mean the same."""

    model: str = Field(max_length=4096)
    prompt: str | list[int]
    drafted: list[int] = Field(max_length=MAX_DRAFTED)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = None
