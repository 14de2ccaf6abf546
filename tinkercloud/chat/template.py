"""A model's chat template: Jinja from its folder, rendered as Hugging Face's tokenizers render it.

What templates may use is not specified but by `apply_chat_template` of transformers: an immutable
sandbox with trimmed blocks, loop controls, `{% generation %}` blocks, `tojson` without escapes,
`raise_exception` and `strftime_now`. Templates come with models, which the operator chooses, but
are run as if they were hostile: the sandbox, no large products, a limit for their output.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tinkercloud.errors import ConfigError, InvalidRequest

Message = Mapping[str, Any]
"""role, content, and what the template knows besides: `tool_calls`, `reasoning_content`, `name`."""

MAX_RENDERED_CHARACTERS = 16 * 1024 * 1024
_MAX_FACTOR = 10_000  # of a product in a template
_CONFIG, _ALONE = "tokenizer_config.json", "chat_template.jinja"
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_FAULTS = (TypeError, LookupError, ValueError, AttributeError, ArithmeticError, RecursionError)
_END_MARK = "<<end of the final message>> "  # a trimmed message loses the blank at its end


class ChatTemplate:
    """takes_tools: whether the template shows tools to the model.

    source: the template that renders conversations; tool_source: another one for those with
    tools, where the model has one. special_tokens: by role, "eos_token" say; templates name them.

    Raises ConfigError for a template that does not compile."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
    ):
        environment = _Environment()
        self._special_tokens = dict(special_tokens or {})
        self._plain = _compiled(environment, source)
        self._with_tools = self._plain
        if tool_source is not None:
            self._with_tools = _compiled(environment, tool_source)
        self.source = source if tool_source is None else f"{source}\n{tool_source}"
        self.takes_tools = tool_source is not None or "tools" in _variables(environment, source)

    @classmethod
    def of_folder(cls, folder: Path) -> "ChatTemplate | None":
        """The template of a Hugging Face tokenizer folder; None where it has none.

        Raises ConfigError for files that cannot be read."""
        config = _tokenizer_config(folder)
        templates = _templates(folder, config)
        if "default" not in templates:
            return None
        return cls(templates["default"], _special_tokens(config), templates.get("tool_use"))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt: with the opening of an assistant's message at its end or, to continue it,
        the last message without its end. options: further variables of the template.

        Raises InvalidRequest where the template refuses the conversation."""
        if continue_final_message:
            text = self._rendered(_with_end_mark(messages), tools, options, opens=False)
            return _before_end_mark(text)
        return self._rendered(messages, tools, options, opens=True)

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None,
        *,
        opens: bool,
    ) -> str:
        template = self._with_tools if tools else self._plain
        variables: dict[str, Any] = {**self._special_tokens, **(options or {})}
        variables |= {"messages": [*messages], "tools": [*tools] or None, "documents": None}
        variables["add_generation_prompt"] = opens
        pieces: list[str] = []
        room = MAX_RENDERED_CHARACTERS
        try:
            for piece in template.generate(variables):
                room -= len(piece)
                if room < 0:
                    raise InvalidRequest(
                        f"the conversation has more than {MAX_RENDERED_CHARACTERS} characters"
                    )
                pieces.append(piece)
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template refuses this conversation: {error}"
            ) from None
        except _FAULTS as error:
            # a template that adds a null to a text, say
            raise InvalidRequest(
                f"the model's chat template cannot render this conversation: {str(error)[:300]}"
            ) from None
        return "".join(pieces)


class _GenerationBlock(Extension):
    """`{% generation %}` marks what an assistant wrote, for training masks; it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class has it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        extensions = [_GenerationBlock, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """A text times a large number would fill the memory before its length could be checked."""
        if not all(isinstance(side, int | float) for side in (left, right)) or operator == "**":
            for side in (left, right):
                if isinstance(side, int) and abs(side) > _MAX_FACTOR:
                    raise jinja2.TemplateError(f"a factor of {side} is too large")
        return super().call_binop(context, operator, left, right)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes `<`, `>`, `&` and quotes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(text: str) -> None:
    raise jinja2.TemplateError(text)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _compiled(environment: jinja2.Environment, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template does not compile: {error}") from None


def _variables(environment: jinja2.Environment, source: str) -> set[str]:
    return meta.find_undeclared_variables(environment.parse(source))


def _tokenizer_config(folder: Path) -> Mapping[str, Any]:
    path = folder / _CONFIG
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    return config if isinstance(config, dict) else {}


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name. A file of its own wins over tokenizer_config.json, as in transformers."""
    named = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(named, str):
        templates["default"] = named
    elif isinstance(named, list):
        templates |= {item["name"]: item["template"] for item in named}
    if (folder / _ALONE).is_file():
        templates["default"] = (folder / _ALONE).read_text(encoding="utf-8")
    more = folder / "additional_chat_templates"
    for path in sorted(more.glob("*.jinja")) if more.is_dir() else ():
        templates[path.stem] = path.read_text(encoding="utf-8")
    return templates


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """A role's token is a text, or an object with its content."""
    tokens: dict[str, str] = {}
    for role in _ROLES:
        token = config.get(role)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            tokens[role] = content
    return tokens


def _with_end_mark(messages: Sequence[Message]) -> list[Message]:
    """The last message with a mark at the end of its text, by which its place is found again."""
    last = copy.deepcopy(dict(messages[-1]))
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _END_MARK
    elif isinstance(content, list) and content and "text" in content[-1]:
        content[-1]["text"] += _END_MARK
    else:
        raise InvalidRequest("the final message has no text that could be continued")
    return [*messages[:-1], last]


def _before_end_mark(text: str) -> str:
    place = text.rfind(_END_MARK.strip())
    if place < 0:
        raise InvalidRequest("the model's chat template leaves out the message to be continued")
    is_trimmed = not text.startswith(_END_MARK, place)
    return text[:place].rstrip() if is_trimmed else text[:place]
