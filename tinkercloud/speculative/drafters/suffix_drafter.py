"""The suffix drafter: a sample continues as text that ended alike was continued before.

It looks at the sample's own output, its prompt, what its group wrote under this version of the
weights, and under earlier ones, and drafts from the longest match of the sample's end (as
SuffixDecoding, Oliaro et al. 2411.04975, over a tree). Matches are kept from token to token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tinkercloud.speculative.drafters.drafter import NO_DRAFT, Draft, Drafter, Stream
from tinkercloud.speculative.drafters.history import Group, History, HistoryLimits, Text
from tinkercloud.speculative.drafters.suffix import NONE, ROOT, Automaton, ContinuationRule

LEAD = 8  # of the prompt's tokens that precede an output, so that its first token may be drafted
CATCH_UP = 32  # tokens after which the match in a text that is new to a sample is taken as complete


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


@dataclass(slots=True)
class Match:
    """`length` of a sample's last tokens are a string of `state`. is_written: all that the sample
    wrote since it began is in this automaton, so that more can be appended; else it was only seen
    in other text."""

    automaton: Automaton
    state: int = ROOT
    length: int = 0
    is_written: bool = False

    def follow(self, tokens: Sequence[int]) -> None:
        self.state, self.length = self.automaton.follow(self.state, self.length, tokens)

    def move_to(self, state: int) -> None:
        self.state, self.length = state, self.automaton.length(state)

    def follow_loosely(self, tokens: Sequence[int]) -> None:
        """As `follow`, but a token that never followed is replaced by the likeliest, which halves
        the length: what came before a mismatch says half as much of what comes after."""
        for token in tokens:
            following, is_equal = self.automaton.step_or_likeliest(self.state, token)
            if following == NONE:
                self.length = 0
                return
            self.state, self.length = following, self.length + 1 if is_equal else self.length // 2


class Reader:
    """A sample's matches in everything that it may continue as."""

    def __init__(self, stream: Stream, history: History, own_tokens: int) -> None:
        self._epoch = stream.epoch
        self._drafted_from: Match | None = None
        self._history = history
        self._own_tokens = own_tokens
        self._num_own = 0
        self._output = Match(Automaton())
        self._matches: dict[Text, Match] = {}
        self._changes = -1
        self.group: Group = history.enter(stream)
        self._text_to_write(stream.tokens, stream.num_prompt)
        if self.group.prompt is not None:
            self._matches[self.group.prompt].move_to(self.group.prompt.end)

    def read(self, tokens: Sequence[int], num_new: int) -> None:
        """tokens: the sample's, of which the last `num_new` were not read yet."""
        num_read = len(tokens) - num_new
        new = tokens[num_read:]
        if self._drafted_from is not None:
            # Before the new tokens are written: else they would match themselves.
            self._drafted_from.follow_loosely(new)
        target = self._text_to_write(tokens, num_read)
        self._write_output(new)
        for text, match in self._matches.items():
            if text is target:
                match.move_to(self._history.write(text, match.state, new))
            else:
                match.follow(new)

    def match(self, tokens: Sequence[int]) -> Match:
        """Where to draft from: the longest match, or what was drafted from before, mismatches
        skipped, where that is longer."""
        longest, before = self.longest(tokens), self._drafted_from
        if before is None or longest.length >= before.length:
            self._drafted_from = before = longest
        return Match(before.automaton, before.state, before.length)

    def longest(self, tokens: Sequence[int]) -> Match:
        """The longest match that was continued; of equals in its own output, then in its prompt,
        then in the newest text."""
        self._refresh(tokens, len(tokens))
        best = Match(self._output.automaton)
        for match in (self._output, *self._matches.values()):
            state, length = match.automaton.continued(match.state, match.length)
            if length > best.length:
                best = Match(match.automaton, state, length)
        return best

    def _write_output(self, new: Sequence[int]) -> None:
        self._num_own += len(new)
        if self._num_own > self._own_tokens:
            self._output, self._num_own = Match(Automaton()), len(new)
        self._output.move_to(self._output.automaton.write(self._output.state, new))

    def _text_to_write(self, tokens: Sequence[int], num_read: int) -> Text | None:
        """The text that the sample is written to, begun with its last tokens where it is new."""
        text = self._history.text_of(self.group, self._epoch)
        self._refresh(tokens, num_read)
        if text is not None and not self._matches[text].is_written:
            lead = tokens[max(0, num_read - LEAD) : num_read]
            match = self._matches[text]
            match.is_written = True
            match.move_to(self._history.write(text, ROOT, lead))
        return text

    def _refresh(self, tokens: Sequence[int], num_read: int) -> None:
        """Drops matches in texts that are forgotten, and finds those in new ones."""
        if self._changes == self.group.changes:
            return
        self._changes = self.group.changes
        before, self._matches = self._matches, {}
        for text in self.group.all_texts():
            match = before.get(text)
            if match is None:
                match = Match(text.automaton)
                match.follow(tokens[max(0, num_read - CATCH_UP) : num_read])
            self._matches[text] = match


class SuffixDrafter(Drafter):
    """Remembers what it observed for as long as `settings.history` allows."""

    name = "suffix"

    def __init__(self, settings: SuffixSettings | None = None) -> None:
        self._settings = settings or SuffixSettings()
        self.history = History(self._settings.history)
        self._readers: dict[int, Reader] = {}

    def begin(self, stream: Stream) -> None:
        reader = Reader(stream, self.history, self._settings.own_tokens)
        self._readers[stream.id] = reader
        reader.read(stream.tokens, len(stream.tokens) - stream.num_prompt)

    def observe(self, stream: Stream, num_new: int) -> None:
        self._readers[stream.id].read(stream.tokens, num_new)

    def end(self, stream: Stream) -> None:
        self.history.leave(self._readers.pop(stream.id).group)

    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        return [self._draft(stream, most) for stream, most in requests]

    def _draft(self, stream: Stream, most: int) -> Draft:
        if most < 1:
            return NO_DRAFT
        reader, settings = self._readers[stream.id], self._settings
        find = reader.match if settings.skips_mismatches else reader.longest
        match = find(stream.tokens)
        most = min(most, int(settings.factor * match.length))
        return match.automaton.continuation(match.state, match.length, most, settings.rule)
