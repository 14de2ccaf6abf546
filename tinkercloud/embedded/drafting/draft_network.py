"""A draft model's network over many samples: what it read of each is kept, and it goes on there.

Its forward passes are ragged: what is new to it of every sample, then one row of each for every
further token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tinkercloud.decoding.sampler import Scan
from tinkercloud.embedded.forward.batch import Part, ragged
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.version import Version

CATCH_UP = 512  # rows that one sample is brought forward in a round; with more it waits


@dataclass(frozen=True, slots=True)
class Start:
    """A sample, all its tokens as the network is to read them, and how many more are wanted."""

    id: int
    tokens: Sequence[int]
    most: int


@dataclass(slots=True)
class Chain:
    """What was drafted after a sample's tokens; chances: of each token, in 0..1."""

    id: int
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)


Choose = Callable[[Sequence[Chain], Tensor], tuple[list[int], list[float]]]
"""The next token of each chain and its chance, by logits (chains, V)."""


@dataclass(slots=True, eq=False)
class _Reader:
    """path: the tokens whose keys and values are in the blocks, drafted ones too. agreed: how many
    of them were once seen to be the sample's."""

    path: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    agreed: int = 0

    def rewind(self, tokens: Sequence[int]) -> None:
        """To what is the sample's own; its last token stays to do."""
        most = min(len(self.path), len(tokens) - 1)
        while self.agreed < most and self.path[self.agreed] == tokens[self.agreed]:
            self.agreed += 1
        self.agreed = min(self.agreed, most)
        del self.path[self.agreed :]


@dataclass(slots=True)
class _Underway:
    reader: _Reader
    tokens: Sequence[int]
    most: int
    chain: Chain


class DraftNetwork:
    """Samples are told apart by numbers of the caller's."""

    def __init__(self, version: Version, runner: Runner, pool: BlockPool):
        self.version, self._runner, self._pool = version, runner, pool
        self._readers: dict[int, _Reader] = {}
        self._longest = version.base.config.max_position_embeddings
        self._vocab_size = version.base.config.vocab_size

    @property
    def scan(self) -> Scan | None:
        return self._runner.scan

    def use(self, version: Version) -> None:
        """Other weights of the same network: what the old ones computed is forgotten."""
        self.version = version
        for reader in self._readers.values():
            reader.path, reader.agreed = [], 0

    def begin(self, sample: int) -> None:
        self._readers[sample] = _Reader()

    def changed(self, sample: int, place: int) -> None:
        """Its tokens from this place on may be others than those that were read."""
        reader = self._readers[sample]
        reader.agreed = min(reader.agreed, place)

    def end(self, sample: int) -> None:
        self._pool.free(self._readers.pop(sample).blocks)

    def go_on(self, starts: Sequence[Start], choose: Choose) -> dict[int, Chain]:
        """By sample; without those that have no room, and those too far behind with an empty
        chain. Call it in inference mode."""
        underway = [one for start in starts if (one := self._started(start)) is not None]
        drafting = self._caught_up(underway, choose)
        while drafting:
            parts = [self._part(one.reader, one.chain.tokens[-1:]) for one in drafting]
            drafting = self._longer(drafting, self._forward(parts), choose)
        return {one.chain.id: one.chain for one in underway}

    def _started(self, start: Start) -> _Underway | None:
        reader, length = self._readers[start.id], len(start.tokens)
        most = min(start.most, self._longest - length)
        if most < 1 or not length:
            return None
        reader.rewind(start.tokens)
        if max(start.tokens[len(reader.path) :]) >= self._vocab_size:
            return None  # a target may have more rows than its tokenizer has tokens
        if not self._pool.extend(reader.blocks, length + most):
            return None
        return _Underway(reader, start.tokens, most, Chain(start.id))

    def _caught_up(self, underway: list[_Underway], choose: Choose) -> list[_Underway]:
        """All read what is new to them; those at their ends have their first token."""
        parts, ready = [], []
        for one in underway:
            new = one.tokens[len(one.reader.path) :]
            if len(new) <= CATCH_UP:
                ready.append(one)
                parts.append(self._part(one.reader, new))
            else:
                self._forward([self._part(one.reader, new[:CATCH_UP])])
        return self._longer(ready, self._forward(parts), choose) if parts else []

    def _part(self, reader: _Reader, tokens: Sequence[int]) -> Part:
        part = Part(self.version, tokens, len(reader.path), reader.blocks, 1)
        reader.path += tokens
        return part

    def _forward(self, parts: Sequence[Part]) -> Tensor:
        return self._runner.forward(ragged(parts), self._pool)

    @staticmethod
    def _longer(drafting: list[_Underway], logits: Tensor, choose: Choose) -> list[_Underway]:
        """One more token each; who wants yet more."""
        tokens, chances = choose([one.chain for one in drafting], logits)
        for one, token, chance in zip(drafting, tokens, chances, strict=True):
            one.chain.tokens.append(token)
            one.chain.chances.append(min(1.0, chance))
        return [one for one in drafting if len(one.chain.tokens) < one.most]
