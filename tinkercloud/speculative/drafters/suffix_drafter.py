"""The suffix drafter: a sample continues as text that ended alike was continued before.

It looks at the sample's own output, its prompt, what its group wrote under this version of the
weights, and under earlier ones, and drafts from the longest match of the sample's end (as
SuffixDecoding, Oliaro et al. 2411.04975, over a tree). Matches are kept from token to token.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from tinkercloud.speculative.drafters.drafter import NO_DRAFT, Draft, Drafter, Stream
from tinkercloud.speculative.drafters.history import Group, History, Text, WrittenText
from tinkercloud.speculative.drafters.suffix import ROOT
from tinkercloud.speculative.drafters.suffix_matches import (
    Automata,
    PlainAutomata,
    SampleMatches,
    SuffixSettings,
)

T = TypeVar("T", bound=WrittenText)
LEAD = 8  # of the prompt's tokens that precede an output, so that its first token may be drafted
CATCH_UP = 32  # tokens after which the match in a text that is new to a sample is taken as complete


class Reader(Generic[T]):
    """A sample, and everything that it may continue as."""

    def __init__(
        self, stream: Stream, history: History[T], matches: SampleMatches[T], own_tokens: int
    ) -> None:
        self._epoch = stream.epoch
        self._history = history
        self._matches = matches
        self._own_tokens = own_tokens
        self._num_own = 0
        self._written: Text[T] | None = None
        self._changes = -1
        self.group: Group[T] = history.enter(stream)
        self._text_to_write(stream.tokens, stream.num_prompt)
        if self.group.prompt is not None:
            self._matches.place(self.group.prompt.automaton, self.group.prompt.end)

    def read(self, tokens: Sequence[int], num_new: int) -> None:
        """tokens: the sample's, of which the last `num_new` were not read yet."""
        num_read = len(tokens) - num_new
        new = tokens[num_read:]
        text = self._text_to_write(tokens, num_read)
        self._num_own += num_new
        if self._num_own > self._own_tokens:
            self._matches.restart_output()
            self._num_own = num_new
        if text is None or not text.kept:
            self._matches.read(new, None)
            return
        before = text.automaton.num_bytes
        self._matches.read(new, text.automaton)
        self._history.written(text, num_new, before)

    def draft(self, tokens: Sequence[int], most: int) -> Draft:
        self._refresh(tokens, len(tokens))
        return self._matches.draft(most)

    def _text_to_write(self, tokens: Sequence[int], num_read: int) -> Text[T] | None:
        """The text that the sample is written to, begun with its last tokens where it is new."""
        text = self._history.text_of(self.group, self._epoch)
        self._refresh(tokens, num_read)
        if text is not None and text is not self._written:
            lead = tokens[max(0, num_read - LEAD) : num_read]
            self._matches.place(text.automaton, self._history.write(text, ROOT, lead))
        self._written = text
        return text

    def _refresh(self, tokens: Sequence[int], num_read: int) -> None:
        """Drops matches in texts that are forgotten, and finds those in new ones."""
        if self._changes == self.group.changes:
            return
        self._changes = self.group.changes
        texts = [text.automaton for text in self.group.all_texts()]
        self._matches.use(texts, tokens[max(0, num_read - CATCH_UP) : num_read])


class SuffixDrafter(Drafter):
    """Remembers what it observed for as long as `settings.history` allows."""

    name = "suffix"

    def __init__(
        self, settings: SuffixSettings | None = None, automata: Automata[Any] | None = None
    ) -> None:
        """automata: with the same drafts as those of this folder, which are the default."""
        self._settings = settings or SuffixSettings()
        self._automata = automata or PlainAutomata()
        self.history = History[Any](self._settings.history, self._automata.text)
        self._readers: dict[int, Reader[Any]] = {}

    def begin(self, stream: Stream) -> None:
        matches = self._automata.matches(self._settings)
        reader = Reader(stream, self.history, matches, self._settings.own_tokens)
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
        return self._readers[stream.id].draft(stream.tokens, most)
