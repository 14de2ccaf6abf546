"""Request bodies of Anthropic's Messages API. Fields that are not named here are ignored; those in
`REFUSED` are known and refused where they ask for something."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from tinkercloud.errors import InvalidField

MAX_MESSAGES = 4096
MAX_TOOLS = 256
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 1024

# field: values that ask for nothing, and what to do instead
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "mcp_servers": ((None, []), "call the server yourself and offer its tools in tools"),
    "container": ((None,), "run code yourself and offer it in tools"),
}


class CountBody(BaseModel):
    """What a prompt is made of. temperature is Anthropic's 0 to 1, and further up to 2."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str = Field(max_length=4096)
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None

    def refuse_unsupported(self) -> None:
        """Raises InvalidField for a field that is known and not served."""
        for name, (harmless, remedy) in REFUSED.items():
            if (self.model_extra or {}).get(name) not in harmless:
                raise InvalidField(name, f"{name} is not served here; {remedy}")


class MessagesBody(CountBody):
    """seed: beyond Anthropic's API: the same request with the same seed has the same answer."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = Field(None, max_length=MAX_STOPS)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = None
    seed: int | None = None
