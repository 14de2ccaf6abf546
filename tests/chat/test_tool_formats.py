"""Tool calls in a sample's text: however it is cut into pieces, the same content and calls."""

import random
from typing import Any

import pytest

from tinkercloud.chat.call_scanner import CallPiece
from tinkercloud.chat.tool_formats import HermesParser, Llama3Parser, ToolParser, tool_format

NAMES = ("weather", "add")
Parsed = tuple[str, list[tuple[str, str]]]


def parsed(parser: ToolParser, pieces: list[str]) -> Parsed:
    content, calls = "", []
    for piece in [*(p for text in pieces for p in parser.feed(text)), *parser.finish()]:
        if isinstance(piece, CallPiece):
            if piece.name is not None:
                calls.append((piece.name, ""))
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
        else:
            content += piece
    return content, calls


def cut(text: str, seed: int) -> list[str]:
    places = sorted(random.Random(seed).choices(range(len(text) + 1), k=len(text) // 3))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


HERMES: dict[str, tuple[str, Parsed]] = {
    "content alone": ("a < b <tool\n", ("a < b <tool\n", [])),
    "a call": (
        '<tool_call>\n{"name": "add", "arguments": {"a": [1, {"b": "}"}]}}\n</tool_call>',
        ("", [("add", '{"a": [1, {"b": "}"}]}')]),
    ),
    "content and two calls": (
        'Let me see.\n\n<tool_call>{"name":"add","arguments":{}}</tool_call>\n'
        '<tool_call>{"name": "weather", "arguments": {"x": "</tool_call> \\" {"}}</tool_call>\n',
        ("Let me see.", [("add", "{}"), ("weather", '{"x": "</tool_call> \\" {"}')]),
    ),
    "arguments first": (
        '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>!',
        ("!", [("add", '{"a": 1}')]),
    ),
    "no call between the tags": (
        "see <tool_call>nothing</tool_call> there",
        ("see<tool_call>nothing</tool_call> there", []),
    ),
    "cut off in the arguments": (
        '<tool_call>{"name": "add", "arguments": {"a": "lo',
        ("", [("add", '{"a": "lo')]),
    ),
    "cut off before the name": ('<tool_call>{"na', ('<tool_call>{"na', [])),
    "without a closing tag": (
        '<tool_call>{"name": "add", "arguments": {"a": 1}}',
        ("", [("add", '{"a": 1}')]),
    ),
    "arguments that never close": (
        '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>and on',
        ("and on", [("add", '{"a": 1')]),
    ),
}
LLAMA: dict[str, tuple[str, Parsed]] = {
    "content": ("It rains {today}; yes", ("It rains {today}; yes", [])),
    "a call": ('{"name": "add", "parameters": {"a": 1}}', ("", [("add", '{"a": 1}')])),
    "with the tag": (
        '<|python_tag|>{"name": "add", "parameters": {}}\n',
        ("", [("add", "{}")]),
    ),
    "two calls": (
        '{"name": "add", "parameters": {"a": 1}}; {"name": "weather", "parameters": {}}',
        ("", [("add", '{"a": 1}'), ("weather", "{}")]),
    ),
    "an object that is no call": ('{"sum": {"a": 1}} done', ('{"sum": {"a": 1}} done', [])),
    "a function that was not offered": (
        '{"name": "rm", "parameters": {}}',
        ('{"name": "rm", "parameters": {}}', []),
    ),
}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("case", HERMES)
def test_hermes_calls_are_read_however_the_text_is_cut(case: str, seed: int) -> None:
    text, expected = HERMES[case]
    assert parsed(HermesParser(NAMES), [text]) == expected
    assert parsed(HermesParser(NAMES), cut(text, seed)) == expected
    assert parsed(HermesParser(NAMES), list(text)) == expected


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("case", LLAMA)
def test_llama_calls_are_read_however_the_text_is_cut(case: str, seed: int) -> None:
    text, expected = LLAMA[case]
    assert parsed(Llama3Parser(NAMES), [text]) == expected
    assert parsed(Llama3Parser(NAMES), cut(text, seed)) == expected
    assert parsed(Llama3Parser(NAMES), list(text)) == expected


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("... <tool_call> ...", "hermes"),
        ("<|python_tag|>", "llama3"),
        ("[TOOL_CALLS]", None),
        ("<tool_call>\n<function=NAME>", None),
    ],
)
def test_the_format_follows_from_the_template(template: str, name: str | None) -> None:
    form = tool_format(template)
    assert (form and form.name) == name


def test_arguments_are_passed_on_while_they_come() -> None:
    parser: Any = HermesParser(NAMES)
    assert parser.feed('<tool_call>{"name": "add", "arguments": ') == []
    assert parser.feed('{"a": ') == [CallPiece(name="add"), CallPiece(arguments='{"a": ')]
    assert parser.feed("12") == [CallPiece(arguments="12")]
