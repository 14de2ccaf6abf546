"""What groups of samples have written, in bounded memory.

A group keeps its prompt, and one automaton for each version of the weights that wrote its samples.
So text of an old version is forgotten by dropping its automaton, and nothing is ever built twice.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from tinkercloud.speculative.drafters.drafter import Stream
from tinkercloud.speculative.drafters.suffix import ROOT

FREED_TO = 0.9  # share of the memory in use after some had to be freed


@dataclass(frozen=True, slots=True)
class HistoryLimits:
    """num_bytes: of all groups. max_age: epochs after which text is forgotten. num_texts: automata
    of one group in addition to its prompt. text_tokens: of one of them, after which it is full.
    prompt_tokens: of the prompt's end that are kept."""

    num_bytes: int = 256 << 20
    max_age: int = 64
    num_texts: int = 4
    text_tokens: int = 32_768
    prompt_tokens: int = 4_096


class WrittenText(Protocol):
    """Every substring of what was written to it (`suffix.Automaton`)."""

    @property
    def num_bytes(self) -> int:
        """Memory."""
        ...

    def write(self, state: int, tokens: Sequence[int]) -> int:
        """Adds tokens to the text that ends in `state`; where it ends then."""
        ...


T = TypeVar("T", bound=WrittenText)


@dataclass(slots=True, eq=False)
class Text(Generic[T]):
    """What one version wrote for one group. end: the state in which the prompt ends. kept: whether
    the group still has it."""

    epoch: int
    automaton: T
    num_tokens: int = 0
    end: int = ROOT
    kept: bool = True


@dataclass(slots=True, eq=False)
class Group(Generic[T]):
    """texts: of the newest version first. changes: how often the set of them became another."""

    key: Hashable
    prompt: Text[T] | None = None
    texts: list[Text[T]] = field(default_factory=list)
    num_live: int = 0
    changes: int = 0

    def all_texts(self) -> list[Text[T]]:
        """The prompt, then the texts."""
        return self.texts if self.prompt is None else [self.prompt, *self.texts]


class History(Generic[T]):
    """Groups by their key, the least recently used first."""

    def __init__(self, limits: HistoryLimits, new_automaton: Callable[[], T]) -> None:
        self._limits = limits
        self._new_automaton = new_automaton
        self._groups: dict[Hashable, Group[T]] = {}
        self._newest = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        """Groups."""
        return len(self._groups)

    def groups(self) -> list[Group[T]]:
        return list(self._groups.values())

    def enter(self, stream: Stream) -> Group[T]:
        """The stream's group, which is kept until `leave`; its texts may be freed before."""
        if stream.epoch > self._newest:
            self._newest = stream.epoch
            self._expire()
        group = self._groups.pop(stream.group, None) or Group[T](stream.group)
        self._groups[stream.group] = group
        group.num_live += 1
        if group.prompt is None:
            self._keep_prompt(group, stream.tokens[: stream.num_prompt])
        return group

    def leave(self, group: Group[T]) -> None:
        group.num_live -= 1
        del self._groups[group.key]
        self._groups[group.key] = group

    def text_of(self, group: Group[T], epoch: int) -> Text[T] | None:
        """The text for samples of that version; None where that is too old to be kept."""
        for text in group.texts:
            if text.epoch == epoch and text.num_tokens < self._limits.text_tokens:
                return text
        text = Text(epoch, self._new_automaton())
        texts = sorted([text, *group.texts], key=lambda text: -text.epoch)[: self._limits.num_texts]
        if epoch < self._oldest or text not in texts:
            return None
        self.num_bytes += text.automaton.num_bytes
        self._keep(group, texts)
        return text

    def write(self, text: Text[T], state: int, tokens: Sequence[int]) -> int:
        """As `WrittenText.write`; see `written`."""
        before = text.automaton.num_bytes
        state = text.automaton.write(state, tokens)
        self.written(text, len(tokens), before)
        return state

    def written(self, text: Text[T], num_tokens: int, bytes_before: int) -> None:
        """A text that is kept has so many tokens more; may free others, this one last."""
        assert text.kept
        text.num_tokens += num_tokens
        self.num_bytes += text.automaton.num_bytes - bytes_before
        if self.num_bytes > self._limits.num_bytes:
            self._free()

    def _keep_prompt(self, group: Group[T], prompt: Sequence[int]) -> None:
        group.prompt = text = Text(self._newest, self._new_automaton())
        group.changes += 1
        self.num_bytes += text.automaton.num_bytes
        kept = prompt[max(0, len(prompt) - self._limits.prompt_tokens) :]
        text.end = self.write(text, ROOT, kept)

    def _keep(self, group: Group[T], texts: list[Text[T]]) -> None:
        for text in group.texts:
            if text not in texts:
                self._drop(text)
        group.texts = texts
        group.changes += 1

    def _drop(self, text: Text[T]) -> None:
        text.kept = False
        self.num_bytes -= text.automaton.num_bytes

    @property
    def _oldest(self) -> int:
        """Epoch that is still remembered."""
        return self._newest - self._limits.max_age

    def _expire(self) -> None:
        oldest = self._oldest
        for group in self.groups():
            if any(text.epoch < oldest for text in group.texts):
                self._keep(group, [text for text in group.texts if text.epoch >= oldest])
            if not group.texts and not group.num_live:
                self._forget(group)

    def _free(self) -> None:
        for group in sorted(self.groups(), key=lambda group: group.num_live > 0):
            if self.num_bytes <= FREED_TO * self._limits.num_bytes:
                break
            self._forget(group)

    def _forget(self, group: Group[T]) -> None:
        self._keep(group, [])
        if group.prompt is not None:
            self._drop(group.prompt)
            group.prompt = None
        if not group.num_live:
            del self._groups[group.key]
