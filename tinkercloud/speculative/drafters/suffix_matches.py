"""Where the end of a sample was seen before, in several texts at once, and what followed it there.

`Matches` says so in Python; `embedded.drafting.compiled_suffix` has the same compiled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from tinkercloud.speculative.drafters.drafter import Draft
from tinkercloud.speculative.drafters.history import HistoryLimits, WrittenText
from tinkercloud.speculative.drafters.suffix import NONE, ROOT, Automaton, ContinuationRule

T = TypeVar("T", bound=WrittenText)
Written = TypeVar("Written", bound=WrittenText, contravariant=True)


@dataclass(frozen=True, slots=True)
class SuffixSettings:
    """factor: tokens drafted for each token that matches, at most. own_tokens: of a sample's own
    output that are remembered at a time. skips_mismatches: text that matched but for a token, a
    number in a form for example, is drafted from beyond that token."""

    rule: ContinuationRule = field(default_factory=ContinuationRule)
    factor: float = 4.0
    own_tokens: int = 16_384
    skips_mismatches: bool = True
    history: HistoryLimits = field(default_factory=HistoryLimits)


class SampleMatches(Protocol[Written]):
    """Of one sample: in its own output, and in other texts."""

    def restart_output(self) -> None:
        """What the sample wrote so far is forgotten."""
        ...

    def use(self, texts: Sequence[Written], recent: Sequence[int]) -> None:
        """The other texts from now on. In one that is new the match is that of `recent`, the
        sample's last tokens."""
        ...

    def place(self, text: Written, state: int) -> None:
        """What the sample has written to one of the texts ends in this state."""
        ...

    def read(self, new: Sequence[int], written: Written | None) -> None:
        """The sample's next tokens, which are added to its own output and to `written`."""
        ...

    def draft(self, most: int) -> Draft:
        """From the longest match that was continued; of equals in its own output, then in the first
        text. Or from where the draft before came from, mismatches skipped, where that match is
        longer. `most` tokens, one at least."""
        ...


class Automata(Protocol[T]):
    """Makes texts, and the matches of samples in them."""

    def text(self) -> T: ...

    def matches(self, settings: SuffixSettings) -> SampleMatches[T]: ...


@dataclass(slots=True)
class Match:
    """`length` of a sample's last tokens are a string of `state`."""

    automaton: Automaton
    state: int = ROOT
    length: int = 0

    def write(self, tokens: Sequence[int]) -> None:
        self.place(self.automaton.write(self.state, tokens))

    def place(self, state: int) -> None:
        self.state, self.length = state, self.automaton.length(state)

    def follow(self, tokens: Sequence[int]) -> None:
        self.state, self.length = self.automaton.follow(self.state, self.length, tokens)

    def follow_loosely(self, tokens: Sequence[int]) -> None:
        """As `follow`, but a token that never followed is replaced by the likeliest, which halves
        the length: what came before a mismatch says half as much of what comes after."""
        for token in tokens:
            following, is_equal = self.automaton.step_or_likeliest(self.state, token)
            if following == NONE:
                self.length = 0
                return
            self.state, self.length = following, self.length + 1 if is_equal else self.length // 2

    def continued(self) -> "Match":
        """The longest suffix of it that was followed by anything."""
        return Match(self.automaton, *self.automaton.continued(self.state, self.length))


class Matches(SampleMatches[Automaton]):
    def __init__(self, settings: SuffixSettings) -> None:
        self._settings = settings
        self._output = Match(Automaton())
        self._others: list[Match] = []
        self._drafted_from: Match | None = None

    def restart_output(self) -> None:
        self._output = Match(Automaton())

    def use(self, texts: Sequence[Automaton], recent: Sequence[int]) -> None:
        before = {id(match.automaton): match for match in self._others}
        self._others = []
        for text in texts:
            match = before.get(id(text))
            if match is None:
                match = Match(text)
                match.follow(recent)
            self._others.append(match)

    def place(self, text: Automaton, state: int) -> None:
        next(match for match in self._others if match.automaton is text).place(state)

    def read(self, new: Sequence[int], written: Automaton | None) -> None:
        if self._drafted_from is not None:
            # Before the new tokens are written: else they would match themselves.
            self._drafted_from.follow_loosely(new)
        self._output.write(new)
        for match in self._others:
            if match.automaton is written:
                match.write(new)
            else:
                match.follow(new)

    def draft(self, most: int) -> Draft:
        best, settings = self._longest(), self._settings
        if settings.skips_mismatches:
            if self._drafted_from is None or best.length >= self._drafted_from.length:
                self._drafted_from = best
            best = self._drafted_from
        most = min(most, int(settings.factor * best.length))
        return best.automaton.continuation(best.state, best.length, most, settings.rule)

    def _longest(self) -> Match:
        best = Match(self._output.automaton)
        for match in (self._output, *self._others):
            continued = match.continued()
            if continued.length > best.length:
                best = continued
        return best


class PlainAutomata(Automata[Automaton]):
    """Those of this folder."""

    def text(self) -> Automaton:
        return Automaton()

    def matches(self, settings: SuffixSettings) -> Matches:
        return Matches(settings)
