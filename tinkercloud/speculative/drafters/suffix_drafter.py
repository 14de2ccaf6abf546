"""The suffix drafter: a sample goes on as text that ended alike went on before.

It looks at the sample's own output, its prompt, what its group wrote under this version of the
weights, and under earlier ones; where the longest end of the sample was seen, from there it drafts
(as SuffixDecoding, Oliaro et al. 2411.04975, over a tree). Every place is kept from token to token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tinkercloud.speculative.drafters.drafter import NO_DRAFT, Draft, Drafter, Stream
from tinkercloud.speculative.drafters.history import Group, History, HistoryLimits, Text
from tinkercloud.speculative.drafters.suffix import NONE, ROOT, Automaton, ContinuationRule

LEAD = 8  # of the prompt's tokens stand before an output, so that its first token may be drafted
CATCH_UP = 32  # tokens after which a place in a text that is new to a sample counts as found


@dataclass(frozen=True, slots=True)
class SuffixSettings:
    """factor: tokens drafted for each token that matches, at most. own_tokens: of a sample's own
    output that are remembered at a time. forgives: text that was right but for a token, a number in
    a form for example, is gone on with behind it."""

    rule: ContinuationRule = field(default_factory=ContinuationRule)
    factor: float = 4.0
    own_tokens: int = 16_384
    forgives: bool = True
    history: HistoryLimits = field(default_factory=HistoryLimits)


@dataclass(slots=True)
class Place:
    """`length` of a sample's last tokens are a string of `state`. is_written: all that the sample
    wrote since it began here is, so that it may be written on; else its like was only seen."""

    automaton: Automaton
    state: int = ROOT
    length: int = 0
    is_written: bool = False

    def follow(self, tokens: Sequence[int]) -> None:
        self.state, self.length = self.automaton.follow(self.state, self.length, tokens)

    def moved_to(self, state: int) -> None:
        self.state, self.length = state, self.automaton.length(state)

    def forgive(self, tokens: Sequence[int]) -> None:
        """As `follow`, but for a token that never came there the one that most often did is taken,
        which leaves half of the length: what stood before it says half as much of what comes."""
        for token in tokens:
            following, was_it = self.automaton.went_on(self.state, token)
            if following == NONE:
                self.length = 0
                return
            self.state, self.length = following, self.length + 1 if was_it else self.length // 2


class Reader:
    """A sample's places in everything that it may go on from."""

    def __init__(self, stream: Stream, history: History, own_tokens: int) -> None:
        self._epoch = stream.epoch
        self._drafted_from: Place | None = None
        self._history = history
        self._own_tokens = own_tokens
        self._num_own = 0
        self._own = Place(Automaton())
        self._places: dict[Text, Place] = {}
        self._changes = -1
        self.group: Group = history.enter(stream)
        self._target(stream.tokens, stream.num_prompt)
        if self.group.prompt is not None:
            self._places[self.group.prompt].moved_to(self.group.prompt.end)

    def read(self, tokens: Sequence[int], num_new: int) -> None:
        """tokens: the sample's, of which the last `num_new` were not read yet."""
        num_read = len(tokens) - num_new
        new = tokens[num_read:]
        if self._drafted_from is not None:  # before these tokens are what came there
            self._drafted_from.forgive(new)
        target = self._target(tokens, num_read)
        self._write_own(new)
        for text, place in self._places.items():
            if text is target:
                place.moved_to(self._history.write(text, place.state, new))
            else:
                place.follow(new)

    def place(self, tokens: Sequence[int]) -> Place:
        """Where to draft from: where the longest end of the sample was seen, or what it was drafted
        from before, with the tokens forgiven that were others."""
        longest, before = self.longest(tokens), self._drafted_from
        if before is None or longest.length >= before.length:
            self._drafted_from = before = longest
        return Place(before.automaton, before.state, before.length)

    def longest(self, tokens: Sequence[int]) -> Place:
        """Where the longest end of the sample was seen and went on; of equals its own, then its
        prompt, then the newest."""
        self._refresh(tokens, len(tokens))
        best = Place(self._own.automaton)
        for place in self._in_order():
            state, length = place.automaton.followed(place.state, place.length)
            if length > best.length:
                best = Place(place.automaton, state, length)
        return best

    def _in_order(self) -> Iterator[Place]:
        yield self._own
        yield from self._places.values()

    def _write_own(self, new: Sequence[int]) -> None:
        self._num_own += len(new)
        if self._num_own > self._own_tokens:
            self._own, self._num_own = Place(Automaton()), len(new)
        self._own.moved_to(self._own.automaton.write(self._own.state, new))

    def _target(self, tokens: Sequence[int], num_read: int) -> Text | None:
        """The text that the sample is written to, begun with its last tokens where it is new."""
        text = self._history.text_of(self.group, self._epoch)
        self._refresh(tokens, num_read)
        if text is not None and not self._places[text].is_written:
            lead = tokens[max(0, num_read - LEAD) : num_read]
            place = self._places[text]
            place.is_written = True
            place.moved_to(self._history.write(text, ROOT, lead))
        return text

    def _refresh(self, tokens: Sequence[int], num_read: int) -> None:
        """Takes leave of texts that are forgotten, and finds its place in new ones."""
        if self._changes == self.group.changes:
            return
        self._changes = self.group.changes
        known, self._places = self._places, {}
        for text in self.group.all_texts():
            place = known.get(text)
            if place is None:
                place = Place(text.automaton)
                place.follow(tokens[max(0, num_read - CATCH_UP) : num_read])
            self._places[text] = place


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
        reader = self._readers[stream.id]
        forgives = self._settings.forgives
        place = (reader.place if forgives else reader.longest)(stream.tokens)
        most = min(most, int(self._settings.factor * place.length))
        rule = self._settings.rule
        return place.automaton.continuation(place.state, place.length, most, rule)
