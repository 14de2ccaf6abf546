"""Grammars against what they define, and hostile ones against the clock."""

import json
import random
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tinkercloud.core.types import MAX_GRAMMAR_CHARACTERS, Grammar
from tinkercloud.errors import UserError
from tinkercloud.grammar.compiler import MAX_CACHED, CompiledGrammar, GrammarCompiler

EOS, VOCAB = 258, 270


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A token for each byte, some for several, <eos>; and rows of the network without a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)} | {'{"': 256, '":': 257, "<eos>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("{", '"'), ('"', ":")]))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.to_str(), VOCAB, (EOS,))


@pytest.fixture(scope="module")
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def schema(content: object) -> Grammar:
    return Grammar("json_schema", json.dumps(content))


def drawn(
    compiled: CompiledGrammar, executor: ThreadPoolExecutor, dice: random.Random, limit: int = 2000
) -> list[int] | None:
    """A uniform choice of what is allowed, ended where that is allowed; None: it did not end."""
    sample, tokens = compiled.begin(executor), []
    while not sample.is_over:
        allowed = np.flatnonzero(sample.allowed()).tolist()
        assert max(allowed) <= EOS
        token = EOS if EOS in allowed else dice.choice(allowed)
        sample.accept(token)
        tokens.append(token)
        if len(tokens) > limit:
            return None
    return tokens


SCHEMAS = [
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy", 3, None]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "string", "pattern": "^[a-c]{3,5}$"},
    {"type": "number", "minimum": -1.5, "maximum": 2},
    {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 4}]},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 500},
    {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 1}},
     "$ref": "#/$defs/t"},
]  # fmt: skip


@pytest.mark.parametrize("content", SCHEMAS, ids=lambda content: json.dumps(content)[:40])
def test_every_text_of_a_schema_validates(
    compiler: GrammarCompiler,
    executor: ThreadPoolExecutor,
    tokenizer: Tokenizer,
    content: dict[str, object],
) -> None:
    compiled, dice = compiler.compile(schema(content)), random.Random(0)
    texts = set()
    for _ in range(30):
        tokens = drawn(compiled, executor, dice)
        if tokens is not None:
            assert tokens[-1] == EOS
            texts.add(tokenizer.decode(tokens))
    assert len(texts) > 3 or "items" in content or "$ref" in content
    for text in texts:
        jsonschema.validate(json.loads(text), content)


def test_an_expression_and_choices(
    compiler: GrammarCompiler, executor: ThreadPoolExecutor, tokenizer: Tokenizer
) -> None:
    dice = random.Random(1)
    compiled = compiler.compile(Grammar("regex", "[0-9]{2}(-[a-f]+)?x"))
    for _ in range(20):
        tokens = drawn(compiled, executor, dice)
        assert tokens is None or re.fullmatch("[0-9]{2}(-[a-f]+)?x", tokenizer.decode(tokens))
    choices = ["yes", "no*.[", "é\n\\", "yesterday"]
    compiled = compiler.compile(Grammar("choice", json.dumps(choices)))
    texts = {tokenizer.decode(drawn(compiled, executor, dice) or []) for _ in range(40)}
    assert texts == set(choices) - {"yesterday"}, "which `drawn` ends at yes"


def test_samples_of_one_grammar_go_their_own_ways(
    compiler: GrammarCompiler, executor: ThreadPoolExecutor
) -> None:
    compiled = compiler.compile(Grammar("regex", "(ab|cd)"))
    ids = {letter: int(np.flatnonzero(compiled.first_mask)[i]) for i, letter in enumerate("ac")}
    one, other = compiled.begin(executor), compiled.begin(executor)
    one.accept(ids["a"])
    other.accept(ids["c"])
    assert not np.array_equal(one.allowed(), other.allowed())
    assert np.array_equal(compiled.begin(executor).allowed(), compiled.first_mask)


def test_what_was_compiled_is_kept_within_bounds(compiler: GrammarCompiler) -> None:
    first = Grammar("regex", "first")
    compiled = compiler.compile(first)
    assert compiler.compile(first) is compiled
    for i in range(MAX_CACHED):
        compiler.compile(Grammar("regex", f"other{i}"))
    assert compiler.compile(first) is not compiled


HOSTILE = {
    "not JSON": Grammar("json_schema", "{"),
    "a number": Grammar("json_schema", "3"),
    "deep JSON": Grammar("json_schema", "[" * 60_000),
    "deep schema": Grammar("json_schema", '{"items":' * 6000 + "{}" + "}" * 6000),
    "huge": Grammar("json_schema", json.dumps({"enum": ["x" * MAX_GRAMMAR_CHARACTERS]})),
    "itself": schema({"$ref": "#"}),
    "a circle": schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                        "$ref": "#/$defs/a"}),
    "somewhere else": schema({"$ref": "http://example.com/schema.json"}),
    "a file": schema({"$ref": "file:///etc/passwd"}),
    "nothing": schema(False),
    "not": schema({"not": {"type": "string"}}),
    "products": schema({"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"type": "integer"}}}
                                             for j in range(10)]} for i in range(12)]}),
    "patterns": schema({"allOf": [{"type": "string", "pattern": f".*{chr(97 + i)}.{{{10 + i}}}.*"}
                                  for i in range(12)]}),
    "remainders": schema({"type": "integer", "multipleOf": 999983}),
    "remainders of several": schema({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}),
    "no expression": Grammar("regex", "(("),
    "an empty choice": Grammar("choice", '["a", ""]'),
    "no choice": Grammar("choice", "[]"),
    "choices that are none": Grammar("choice", '{"a": 1}'),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_grammar_that_cannot_be_used_is_refused_soon(
    compiler: GrammarCompiler, name: str
) -> None:
    began = time.monotonic()
    with pytest.raises(UserError) as refusal:
        compiler.compile(HOSTILE[name])
    assert time.monotonic() - began < 3.0
    assert len(str(refusal.value)) < 700


EXPENSIVE = {
    "a choice of thousands": Grammar("choice", json.dumps([f"value {i}" for i in range(4000)])),
    "long strings": schema({"type": "string", "minLength": 10**9}),
    "long arrays": schema({"type": "array", "items": {"type": "integer"}, "minItems": 10**9}),
    "nested repetitions": Grammar("regex", "(a{1,1000}){1,1000}"),
    "an exponential automaton": Grammar("regex", "(a|b)*a(a|b){300}"),
    "shared definitions": schema({
        "$defs": {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"},
                                           "b": {"$ref": f"#/$defs/d{i + 1}"}}}
                  for i in range(40)} | {"d40": {"type": "integer"}},
        "$ref": "#/$defs/d0",
    }),
    "many properties": schema({"properties": {
        f"k{i}": {"type": "string", "pattern": f"^x{i}[a-z]*$"} for i in range(900)}}),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(EXPENSIVE))
def test_an_expensive_grammar_is_compiled_and_followed_within_limits(
    compiler: GrammarCompiler, executor: ThreadPoolExecutor, name: str
) -> None:
    """Or refused, at whichever token: but soon."""
    began = time.monotonic()
    try:
        sample = compiler.compile(EXPENSIVE[name]).begin(executor)
        for _ in range(100):
            allowed = np.flatnonzero(sample.allowed())
            sample.accept(int(allowed[0]))
            if sample.is_over:
                break
    except UserError as error:
        assert "grammar" in str(error)
    assert time.monotonic() - began < 5.0


def test_a_server_without_the_extra_says_what_to_install(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UserError, match=r"pip install 'tinkercloud\[grammar\]'"):
        GrammarCompiler(tokenizer.to_str(), VOCAB, (EOS,))
