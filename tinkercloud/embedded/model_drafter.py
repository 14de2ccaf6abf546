"""A smaller model with the target's tokens as drafter.

It draws with the noise that the target will draw with (the coupling of Daliri et al. 2408.07978),
so that its tokens stand nearly as often as any rule could make them. Its forward passes are ragged:
what a sample wrote since the last round, then one row for each further token of depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tinkercloud.decoding.sampler import sample
from tinkercloud.embedded.base_model import BaseModel
from tinkercloud.embedded.blocks import BlockPool
from tinkercloud.embedded.draft_rows import row_params
from tinkercloud.embedded.runners import Part, Runner, ragged
from tinkercloud.embedded.versions import Version
from tinkercloud.errors import ConfigError
from tinkercloud.speculative.draft_law import AUDIT_EVERY, AuditSchedule, DraftLaw
from tinkercloud.speculative.drafter import NOTHING, Draft, Stream
from tinkercloud.weights.tokenizer import ensure_tokenizer_folder

CATCH_UP = 512  # rows that one sample is brought forward in a round; with more it waits


@dataclass(slots=True, eq=False)
class _Reader:
    """path: the tokens whose keys and values are in the blocks, drafted ones too. agreed: how many
    of them were once seen to be the sample's."""

    stream: Stream
    path: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    agreed: int = 0

    def rewind(self) -> None:
        """To what is the sample's own; its last token stays to do."""
        tokens = self.stream.tokens
        most = min(len(self.path), len(tokens) - 1)
        while self.agreed < most and self.path[self.agreed] == tokens[self.agreed]:
            self.agreed += 1
        self.agreed = min(self.agreed, most)
        del self.path[self.agreed :]


@dataclass(slots=True)
class _Underway:
    reader: _Reader
    most: int
    is_audited: bool
    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    laws: list[DraftLaw] = field(default_factory=list)


class ModelDrafter:
    """The version's weights may be replaced between rounds (`use`)."""

    name = "model"
    is_coupled = True
    layers: tuple[int, ...] = ()

    def __init__(
        self, version: Version, runner: Runner, pool: BlockPool, audit_every: int = AUDIT_EVERY
    ):
        self.version, self._runner, self._pool = version, runner, pool
        self._audits = AuditSchedule(audit_every)
        self._readers: dict[int, _Reader] = {}
        self._longest = version.base.config.max_position_embeddings

    def use(self, version: Version) -> None:
        """Other weights of the same network: what the old ones computed is forgotten."""
        self.version = version
        for reader in self._readers.values():
            reader.path, reader.agreed = [], 0

    def begin(self, stream: Stream) -> None:
        self._readers[stream.id] = _Reader(stream)

    def observe(self, stream: Stream, num_new: int) -> None:
        """It reads them when it is asked."""

    def see(self, stream: Stream, first: int, hidden: Tensor) -> None:
        """It computes its own."""

    def end(self, stream: Stream) -> None:
        self._pool.drop(self._readers.pop(stream.id).blocks)

    @torch.inference_mode()
    def propose(self, asked: Sequence[tuple[Stream, int]]) -> list[Draft]:
        underway = {
            stream.id: one
            for stream, most in asked
            if most > 0 and (one := self._started(stream, most)) is not None
        }
        drafting = self._caught_up(list(underway.values()))
        while drafting:
            parts = [self._part(one.reader, one.tokens[-1:]) for one in drafting]
            drafting = self._drawn(drafting, self._forward(parts))
        return [self._draft(underway.get(stream.id)) for stream, _ in asked]

    def _started(self, stream: Stream, most: int) -> _Underway | None:
        reader = self._readers[stream.id]
        reader.rewind()
        length = len(stream.tokens)
        most = min(most, self._longest - length)
        if most < 1 or not self._pool.extend(reader.blocks, length + most):
            return None
        return _Underway(reader, most, self._audits.takes(stream.temperature))

    def _caught_up(self, underway: list[_Underway]) -> list[_Underway]:
        """All read what is new to them; those at their ends have their first token."""
        parts, ready = [], []
        for one in underway:
            reader = one.reader
            new = reader.stream.tokens[len(reader.path) :]
            if len(new) <= CATCH_UP:
                ready.append(one)
                parts.append(self._part(reader, new))
            else:
                self._forward([self._part(reader, new[:CATCH_UP])])
        return self._drawn(ready, self._forward(parts)) if parts else []

    def _part(self, reader: _Reader, tokens: Sequence[int]) -> Part:
        part = Part(self.version, tokens, len(reader.path), reader.blocks, 1)
        reader.path += tokens
        return part

    def _forward(self, parts: Sequence[Part]) -> Tensor:
        return self._runner.forward(ragged(parts), self._pool)

    def _drawn(self, drafting: list[_Underway], logits: Tensor) -> list[_Underway]:
        """One more token each; who wants yet more."""
        drawn = sample(
            logits,
            [row_params(one.reader.stream, len(one.tokens)) for one in drafting],
            self._runner.scan,
        )
        chances = drawn.logprobs.exp().tolist()
        for one, token, chance in zip(drafting, drawn.tokens.tolist(), chances, strict=True):
            one.tokens.append(token)
            one.confidences.append(min(1.0, chance))
        for i, one in enumerate(drafting):
            if one.is_audited:
                one.laws.append(DraftLaw.of(drawn.law(i)[0].exp()))
        return [one for one in drafting if len(one.tokens) < one.most]

    @staticmethod
    def _draft(one: _Underway | None) -> Draft:
        if one is None:
            return NOTHING
        return Draft(tuple(one.tokens), tuple(one.confidences), tuple(one.laws))


def open_draft(path: Path, target: BaseModel, cache_dir: Path) -> BaseModel:
    """The draft model of a Hugging Face folder or GGUF file. Raises ConfigError where its tokens
    are not the target's."""
    if not path.exists():
        raise ConfigError(f"--speculate model:{path}: there is no such file or folder")
    tokenizer = ensure_tokenizer_folder(path, cache_dir)
    draft = BaseModel.load(f"draft {path}", path, tokenizer, target.dtype, target.device)
    if draft.config.vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"the draft model {path} has {draft.config.vocab_size} tokens and {target.name} "
            f"{target.config.vocab_size}; a draft model needs the target's tokenizer"
        )
    decoders = (draft.decoder, target.decoder)
    theirs, ours = (one.get_vocab() if one is not None else {} for one in decoders)
    if theirs and ours and theirs != ours:
        raise ConfigError(f"the tokenizer of the draft model {path} is not that of {target.name}")
    return draft
