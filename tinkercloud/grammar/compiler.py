"""Grammars compiled for a tokenizer by llguidance.

llguidance, because it needs nothing but the tokenizer's JSON (no torch in the process that
compiles), has limits for every step and reports what exceeds them as an error of that grammar, and
lets other threads run while it compiles and computes masks.

Axes: V vocabulary, of the tokenizer.
"""

import threading
from collections import OrderedDict
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkercloud.core.types import Grammar
from tinkercloud.errors import UserError
from tinkercloud.grammar.schema_limits import checked_source, choices_expression

MAX_CACHED = 32
_LIMITS = {
    "max_grammar_size": 200_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
}
"""A quarter of llguidance's own or less: with these no hostile grammar that was tried compiled for
longer than 0.2 s or took longer than 20 ms for a mask."""
_JSON_OPTIONS = {
    # A model in doubt goes on with white space, which is always allowed: bounded runs end that.
    "whitespace_pattern": r"[\x20\x0A]{0,32}",
    "lenient": False,  # what cannot be enforced is refused
}


class GrammarCompiler:
    """For one tokenizer. tokenizer: the text of its tokenizer.json. Safe for several threads.

    Raises UserError where llguidance is not installed or does not know the tokenizer.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: tuple[int, ...]):
        library = _library()
        try:
            self._tokenizer = library.LLTokenizer(
                tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids)
            )
        except ValueError as error:
            raise UserError(f"grammars cannot be used with this tokenizer: {error}") from None
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._cached: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> "CompiledGrammar":
        """Raises UserError for a grammar that is none, or that is more than is compiled."""
        with self._lock:
            compiled = self._cached.get(grammar)
        if compiled is None:
            compiled = self._compiled(grammar)
        with self._lock:
            self._cached[grammar] = compiled
            self._cached.move_to_end(grammar)
            while len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
        return compiled

    def _compiled(self, grammar: Grammar) -> "CompiledGrammar":
        library, source = _library(), checked_source(grammar)
        limits = library.LLParserLimits(**_LIMITS)
        try:
            written = _written(library.LLMatcher, grammar, source)
        except ValueError as error:
            raise UserError(_refusal(error)) from None
        matcher = library.LLMatcher(self._tokenizer, written, log_level=0, limits=limits)
        if matcher.is_error():
            raise UserError(_refusal(matcher.get_error()))
        return CompiledGrammar(matcher, self._vocab_size, frozenset(self._eos_token_ids))


class CompiledGrammar:
    """What the samples of a request begin with. Raises UserError where no text matches."""

    def __init__(self, matcher: Any, vocab_size: int, eos_token_ids: frozenset[int]):
        self._matcher, self._vocab_size = matcher, vocab_size
        self.eos_token_ids = eos_token_ids
        self.first_mask = mask_of(matcher, vocab_size)

    def begin(self, executor: Executor) -> "SampleGrammar":
        """For one sample. executor: computes masks, while the network computes logits."""
        return SampleGrammar(self, self._matcher.deep_copy(), self._vocab_size, executor)


class SampleGrammar:
    """Where one sample is in its grammar. One thread calls it; after an error it allows nothing
    more than that error."""

    def __init__(self, grammar: CompiledGrammar, matcher: Any, vocab_size: int, executor: Executor):
        self._grammar, self._matcher = grammar, matcher
        self._vocab_size, self._executor = vocab_size, executor
        self._mask: NDArray[np.bool_] | Future[NDArray[np.bool_]] = grammar.first_mask
        self.is_over = False  # an end-of-sequence token was sampled

    def allowed(self) -> NDArray[np.bool_]:
        """(V,), at least one. Raises UserError where the grammar is too much work to follow."""
        if isinstance(self._mask, Future):
            self._mask = self._mask.result()
        return self._mask

    def accept(self, token: int) -> None:
        """The sample goes on with this token, which was allowed."""
        self.is_over = token in self._grammar.eos_token_ids
        if not self.is_over:
            self._mask = self._executor.submit(self._after, token)

    def _after(self, token: int) -> NDArray[np.bool_]:
        self._matcher.consume_token(token)
        return mask_of(self._matcher, self._vocab_size)


def mask_of(matcher: Any, vocab_size: int) -> NDArray[np.bool_]:
    """The tokens that may come next, bool (V,); end-of-sequence where the text is complete. Raises
    UserError."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    if matcher.is_error():
        raise UserError(_refusal(matcher.get_error()))
    mask = np.unpackbits(bits, count=vocab_size, bitorder="little").astype(bool)
    if not mask.any():
        raise UserError("the grammar allows no token here; no text may match it")
    return mask


def _written(matcher: Any, grammar: Grammar, source: Any) -> str:
    """In llguidance's own form."""
    if grammar.kind == "regex":
        return matcher.grammar_from_regex(source)
    if grammar.kind == "choice":
        return matcher.grammar_from_regex(choices_expression(source))
    return matcher.grammar_from_json_schema(source, overrides=_JSON_OPTIONS)


def _refusal(error: object) -> str:
    """llguidance adds its parser's state to an error, which says nothing to a user."""
    return f"the grammar cannot be used: {str(error).partition(chr(10))[0][:500]}"


def _library() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError:
        raise UserError(
            "grammars (JSON schemas and others) need llguidance on the server, which is not "
            "installed: pip install 'tinkercloud[grammar]'"
        ) from None
    return llguidance
