"""What a base model's folder says of text: its tokenizer, its chat template, its tool calls."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from tinkercloud.chat.reasoning import ReasoningFormat, reasoning_format
from tinkercloud.chat.template import ChatTemplate, Message
from tinkercloud.chat.tool_formats import FORMATS, HERMES, ToolFormat, tool_format
from tinkercloud.chat.tool_prompt import without_tools
from tinkercloud.core.types import ServedModel
from tinkercloud.errors import ConfigError, InvalidField, InvalidRequest
from tinkercloud.weights.token_bytes import TokenBytes


class TextCodec(Protocol):
    """Between text and tokens. encode: bos: with the tokens that the tokenizer puts before a text
    of its own (completions), without for a rendered conversation, whose template has them."""

    def encode(self, text: str, *, bos: bool) -> list[int]: ...

    def bytes_of(self, token: int) -> bytes: ...

    def name_of(self, token: int) -> str: ...


class TokenizerCodec:
    """spoken: the special tokens that count as text, because tool calls are written with them."""

    def __init__(self, tokenizer: Tokenizer, spoken: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._bytes = TokenBytes(tokenizer, spoken)

    def encode(self, text: str, *, bos: bool) -> list[int]:
        """Special tokens that the text writes out become these tokens, as with Hugging Face's
        tokenizers and with vLLM."""
        return self._tokenizer.encode(text, add_special_tokens=bos).ids

    def bytes_of(self, token: int) -> bytes:
        """b"" for special tokens."""
        return self._bytes.of(token)

    def name_of(self, token: int) -> str:
        text = self._bytes.of(token).decode(errors="replace")
        return text or self._tokenizer.id_to_token(token) or ""


class NumberCodec:
    """For a model without a tokenizer: a token's text is its number followed by a space, as the
    backend `fake` has it for its stop strings."""

    def encode(self, text: str, *, bos: bool) -> list[int]:
        if not re.fullmatch(r"\s*(\d{1,9}\s*)+", text):
            raise InvalidRequest(
                "this model has no tokenizer; send token ids, as a list or as a text of numbers"
            )
        return [int(number) for number in text.split()]

    def bytes_of(self, token: int) -> bytes:
        return f"{token} ".encode()

    def name_of(self, token: int) -> str:
        return f"{token} "


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a prompt is rendered from. messages: in the form of chat templates, arguments of tool
    calls as objects. tools: function definitions, {"type": "function", "function": {...}}.
    continue_final_message: the sample goes on in the last message. options: variables of the
    template, `enable_thinking` say."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    continue_final_message: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class TextModel:
    """template: None where the model has none, and so no chats. tools: None where its template
    shows tools in a form whose calls are not known here."""

    name: str
    codec: TextCodec
    template: ChatTemplate | None
    tools: ToolFormat | None
    reasoning: ReasoningFormat | None

    @classmethod
    def of(cls, served: ServedModel) -> "TextModel":
        """As `of_folder`."""
        return cls.of_folder(served.name, served.tokenizer_path)

    @classmethod
    def of_folder(cls, name: str, folder: Path | None) -> "TextModel":
        """Reads the folder: call it in a thread. Raises ConfigError for one that cannot be read."""
        template = None if folder is None else ChatTemplate.of_folder(folder)
        source = "" if template is None else template.source
        # A template without tools gets them in Hermes' form (`tool_prompt`).
        shows_tools = template is not None and template.takes_tools
        tools = tool_format(source) if shows_tools else HERMES
        codec = _codec(folder, () if tools is None else tools.spoken)
        return cls(name, codec, template, tools, reasoning_format(source))

    def rendered(self, conversation: Conversation) -> str:
        """The prompt's text. Raises InvalidRequest."""
        if self.template is None:
            raise InvalidRequest(
                f"{self.name} has no chat template, so it takes no messages; send text to "
                "/completions, or serve the model with a chat_template in its folder"
            )
        messages, tools = conversation.messages, conversation.tools
        if tools:
            self.require_tools()
        if not self.template.takes_tools:
            messages, tools = without_tools(messages, tools), ()
        return self.template.render(
            messages,
            tools,
            continue_final_message=conversation.continue_final_message,
            options=conversation.options,
        )

    def require_tools(self) -> ToolFormat:
        """Raises InvalidField."""
        if self.tools is None:
            names = ", ".join(form.name for form in FORMATS)
            raise InvalidField(
                "tools",
                f"the chat template of {self.name} writes tool calls in a form that is not known "
                f"here (known: {names}); leave tools out and describe them in the prompt",
            )
        return self.tools

    def prompt(self, conversation: Conversation) -> list[int]:
        """The prompt's tokens, equal to those of `apply_chat_template`. Raises InvalidRequest."""
        return self.codec.encode(self.rendered(conversation), bos=False)


def _codec(folder: Path | None, spoken: Sequence[str]) -> TextCodec:
    path = None if folder is None else folder / "tokenizer.json"
    if path is None or not path.is_file():
        return NumberCodec()
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"cannot read {path}: {error}") from error
    return TokenizerCodec(tokenizer, spoken)
