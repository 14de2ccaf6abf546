"""Suffix automata and a sample's matches in them, compiled (suffix.c): the drafts are those of
`speculative.drafters.suffix_matches`, in a quarter of the time."""

import ctypes as c
from collections.abc import Sequence

from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.native.compiler import library
from tinkercloud.embedded.native.structures import SuffixMatch, SuffixMatches, SuffixRule
from tinkercloud.speculative.drafters.drafter import Draft
from tinkercloud.speculative.drafters.suffix_drafter import SuffixDrafter
from tinkercloud.speculative.drafters.suffix_matches import (
    Automata,
    SampleMatches,
    SuffixSettings,
)

NONE = -1
MOST_SHORTER = 15  # of suffix.h


def suffix_drafter(base: BaseModel) -> SuffixDrafter:
    """Compiled where the base model's passes are; elsewhere the machine may have no compiler."""
    loaded = library() if base.device.type == "cpu" else None
    return SuffixDrafter(automata=None if loaded is None else CompiledAutomata(loaded))


class CompiledAutomaton:
    """As `suffix.Automaton`, for writing. Raises MemoryError."""

    def __init__(self, library: c.CDLL) -> None:
        self._library = library
        self.handle = library.suffix_new()
        if not self.handle:
            raise MemoryError

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.suffix_free(self.handle)

    def __len__(self) -> int:
        """States."""
        return self._library.suffix_num_states(self.handle)

    @property
    def num_bytes(self) -> int:
        return self._library.suffix_bytes(self.handle)

    def write(self, state: int, tokens: Sequence[int]) -> int:
        state = self._library.suffix_write(self.handle, state, *_array(tokens))
        if state == NONE:
            raise MemoryError
        return state


class CompiledMatches(SampleMatches[CompiledAutomaton]):
    """The first of the matches in C is that in the sample's own output."""

    def __init__(self, library: c.CDLL, settings: SuffixSettings) -> None:
        self._library = library
        self._rule = _rule_of(settings)
        self._automata = [CompiledAutomaton(library)]
        self._matches = (SuffixMatch * 1)(SuffixMatch(self._automata[0].handle, 0, 0))
        # C has the addresses: what they are of is kept here.
        self._drafted_from: CompiledAutomaton | None = None
        self._state = SuffixMatches(self._matches, 1, SuffixMatch(None, 0, 0))

    def restart_output(self) -> None:
        self._automata[0] = CompiledAutomaton(self._library)
        self._matches[0] = SuffixMatch(self._automata[0].handle, 0, 0)

    def use(self, texts: Sequence[CompiledAutomaton], recent: Sequence[int]) -> None:
        before = {id(text): self._matches[at] for at, text in enumerate(self._automata)}
        automata = [self._automata[0], *texts]
        matches = (SuffixMatch * len(automata))()
        for at, text in enumerate(automata):
            if id(text) in before:
                matches[at] = before[id(text)]
            else:
                matches[at] = SuffixMatch(text.handle, 0, 0)
                self._library.suffix_follow(c.byref(matches[at]), *_array(recent))
        self._automata, self._matches = automata, matches
        self._state.matches, self._state.num = matches, len(automata)

    def place(self, text: CompiledAutomaton, state: int) -> None:
        self._library.suffix_place(c.byref(self._matches[self._automata.index(text)]), state)

    def read(self, new: Sequence[int], written: CompiledAutomaton | None) -> None:
        at = NONE if written is None else self._automata.index(written)
        if not self._library.suffix_read(self._state, *_array(new), at):
            raise MemoryError

    def draft(self, most: int) -> Draft:
        tokens, shares, chosen = (c.c_int32 * most)(), (c.c_double * most)(), c.c_int64()
        num = self._library.suffix_draft(self._state, most, self._rule, tokens, shares, chosen)
        if chosen.value != NONE:
            self._drafted_from = self._automata[chosen.value]
        return Draft(tuple(tokens[:num]), tuple(shares[:num]))


class CompiledAutomata(Automata[CompiledAutomaton]):
    def __init__(self, library: c.CDLL) -> None:
        self._library = library
        _declare(library)

    def text(self) -> CompiledAutomaton:
        return CompiledAutomaton(self._library)

    def matches(self, settings: SuffixSettings) -> CompiledMatches:
        return CompiledMatches(self._library, settings)


def _declare(library: c.CDLL) -> None:
    """What the functions of suffix.c take and give."""
    pointer, number, tokens = c.c_void_p, c.c_int64, c.c_void_p
    matches, match, rule = map(c.POINTER, (SuffixMatches, SuffixMatch, SuffixRule))
    drafted = pointer, pointer, c.POINTER(number)
    for function, result, arguments in (
        (library.suffix_new, pointer, ()),
        (library.suffix_free, None, (pointer,)),
        (library.suffix_bytes, number, (pointer,)),
        (library.suffix_num_states, number, (pointer,)),
        (library.suffix_write, c.c_int32, (pointer, c.c_int32, tokens, number)),
        (library.suffix_read, number, (matches, tokens, number, number)),
        (library.suffix_place, None, (match, c.c_int32)),
        (library.suffix_follow, None, (match, tokens, number)),
        (library.suffix_draft, number, (matches, number, rule, *drafted)),
    ):
        function.restype, function.argtypes = result, arguments


def _array(tokens: Sequence[int]) -> tuple["c.Array[c.c_int32]", int]:
    num = len(tokens)
    return (c.c_int32 * num)(*tokens), num


def _rule_of(settings: SuffixSettings) -> SuffixRule:
    rule = settings.rule
    assert rule.num_shorter <= MOST_SHORTER
    return SuffixRule(
        *(rule.share, rule.doubt, rule.shorter, float(rule.long), settings.factor),
        *(rule.shortest, rule.num_shorter, int(settings.skips_mismatches)),
    )
