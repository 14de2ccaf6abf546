"""A draft head on the compiled pass, as `HeadNetwork`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from tinkercloud.embedded.drafting.head_network import (
    ChainRequest,
    UnreadRows,
    chain_start,
    drafts_of,
)
from tinkercloud.embedded.forward.kv_blocks import BlockPool, blocks_for, kv_layout_of
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.packed_tensors import EMBEDDING, PackedTensors
from tinkercloud.embedded.native.draft_head import (
    Ends,
    FrozenMatrices,
    HeadMatrices,
    NativeHead,
)
from tinkercloud.embedded.native.layered_pass import Rows
from tinkercloud.embedded.native.packed import pack
from tinkercloud.embedded.native.team import Team
from tinkercloud.embedded.native.train_bindings import training_team
from tinkercloud.speculative.drafters.drafter import Draft
from tinkercloud.speculative.head.draft import confidences_of, drawn_chains, lead_of
from tinkercloud.speculative.head.head import Head
from tinkercloud.speculative.head.vocabulary import DraftVocabulary

MOST_ROWS = 256 * 1024  # of all slots together; they take memory when they are written
MOST_POSITIONS = 2048  # of a slot, with the tokens that are drafted behind its rows


@dataclass(slots=True)
class _Slot:
    """Rows that the blocks hold: so many."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0


class CompiledHead:
    """A `HeadNetwork`. Matrices are rounded to bfloat16 (native/draft_head.py). team: who computes
    the target's passes; its threads are at rest between them."""

    def __init__(self, head: Head, params: Mapping[str, Tensor], base: BaseModel, team: Team):
        assert isinstance(base.weights, PackedTensors), "packed where there are the kernels"
        self.head, self.params = head, dict(params)
        self._team = team
        one_layer = replace(base.config, num_layers=1)
        self._pool = BlockPool(
            one_layer, torch.bfloat16, base.device, blocks_for(MOST_ROWS),
            kv_layout_of(torch.bfloat16),
        )  # fmt: skip
        with training_team() as packers:
            unembed = pack(packers, head.frozen.unembed.bfloat16())
        embed = base.weights.packed.matrices[EMBEDDING]
        frozen = FrozenMatrices(embed, unembed, head.vocabulary.ids)
        rotary = head.rotary(torch.arange(MOST_POSITIONS))
        blocks = (self._pool.keys[0], self._pool.values[0])
        self._native = NativeHead(base.config, _packed(params), frozen, rotary, blocks)
        self._slots: dict[int, _Slot] = {}
        self._num_begun = 0

    def use(self, params: Mapping[str, Tensor]) -> None:
        self.params = dict(params)
        self._native.use(_packed(params))

    def begin(self) -> int:
        self._num_begun += 1
        self._slots[self._num_begun] = _Slot()
        return self._num_begun

    def end(self, slot: int) -> None:
        self.empty(slot)
        del self._slots[slot]

    def empty(self, slot: int) -> None:
        kept = self._slots[slot]
        self._pool.free(kept.blocks)
        kept.blocks, kept.length = [], 0

    def length(self, slot: int) -> int:
        return self._slots[slot].length

    def read(self, unread: Sequence[UnreadRows]) -> list[Tensor | None]:
        fitting = [rows for rows in unread if self._has_room(rows.slot, len(rows.tokens))]
        if not fitting:
            return [None] * len(unread)
        slots, counts = [rows.slot for rows in fitting], [len(rows.tokens) for rows in fitting]
        tokens = np.concatenate([np.array(rows.tokens, np.int64) for rows in fitting])
        states = torch.cat([rows.states for rows in fitting])
        outputs = self._native.outputs(self._team, self._rows(slots, tokens, counts), states)
        last: dict[int, Tensor] = {}
        for slot, count, end in zip(slots, counts, np.cumsum(counts), strict=True):
            self._slots[slot].length += count
            last[slot] = outputs[end - 1]
        return [last.get(rows.slot) for rows in unread]

    def drafts(self, requests: Sequence[ChainRequest], unsure_below: float) -> list[Draft]:
        """Chains of which all that the head gives can be drawn are drawn in one call; the others
        token by token, from logits."""
        fitting = [request for request in requests if self._has_room(request.slot, request.most)]
        whole = [r for r in fitting if r.first.is_whole and not r.is_audited]
        others = [r for r in fitting if not r.first.is_whole or r.is_audited]
        drafts = self._drawn(whole, unsure_below) if whole else []
        drafts += self._drawn_from_logits(others) if others else []
        slots = [request.slot for request in (*whole, *others)]
        found = dict(zip(slots, drafts, strict=True))
        return [found.get(request.slot, Draft()) for request in requests]

    def _drawn(self, requests: Sequence[ChainRequest], unsure_below: float) -> list[Draft]:
        slots = [request.slot for request in requests]
        ends = Ends(
            torch.stack([request.output for request in requests]),
            [self._slots[slot].length for slot in slots],
            self._tables(slots),
            [request.first for request in requests],
            [request.most for request in requests],
            lead_of(unsure_below),
        )
        tokens, leads = self._native.chains(self._team, ends)
        confidences = confidences_of(torch.from_numpy(leads)).tolist()
        counts = (tokens >= 0).sum(-1).tolist()
        rows = zip(tokens.tolist(), confidences, counts, strict=True)
        return [Draft(tuple(ids[:count]), tuple(probs[:count])) for ids, probs, count in rows]

    def _drawn_from_logits(self, requests: Sequence[ChainRequest]) -> list[Draft]:
        start = chain_start(requests)
        for request in requests:  # all of these go as far as the longest one
            if not self._has_room(request.slot, len(start.rows)):
                return [Draft()] * len(requests)
        steps = _Steps(self, start.slots)
        return drafts_of(requests, drawn_chains(steps, start))

    def logits(self, output: Tensor) -> Tensor:
        """output (B, D), of the layer -> (B, Vd)."""
        return self._native.logits(self._team, output)

    def extended(self, slots: Sequence[int], output: Tensor, tokens: Tensor, ahead: int) -> Tensor:
        """Of rows with these features (B, D) and tokens, `ahead` places behind those that the slots
        have, which do not count as theirs: the layer's output."""
        rows = self._rows(slots, tokens.numpy(), [1] * len(slots), ahead)
        return self._native.next_outputs(self._team, rows, output)

    def _rows(
        self, slots: Sequence[int], tokens: np.ndarray, counts: Sequence[int], ahead: int = 0
    ) -> Rows:
        """Behind the rows that slots have, and `ahead` more."""
        starts = [self._slots[slot].length + ahead for slot in slots]
        spans = zip(starts, counts, strict=True)
        positions = np.concatenate([np.arange(s, s + n, dtype=np.int32) for s, n in spans])
        sequence = np.repeat(np.arange(len(slots), dtype=np.int32), counts)
        return Rows(tokens, positions, sequence, self._tables(slots))

    def _tables(self, slots: Sequence[int]) -> np.ndarray:
        blocks = [self._slots[slot].blocks for slot in slots]
        tables = np.zeros((len(slots), max(map(len, blocks))), np.int32)
        for table, own in zip(tables, blocks, strict=True):
            table[: len(own)] = own
        return tables

    def _has_room(self, slot: int, count: int) -> bool:
        """For so many rows more; made where it can be."""
        kept = self._slots[slot]
        needed = kept.length + count
        return needed <= MOST_POSITIONS and self._pool.extend(kept.blocks, needed)


@dataclass(slots=True)
class _Steps:
    network: CompiledHead
    slots: Sequence[int]
    num_taken: int = 0

    @property
    def vocabulary(self) -> DraftVocabulary:
        return self.network.head.vocabulary

    def logits(self, output: Tensor) -> Tensor:
        return self.network.logits(output)

    def extended(self, output: Tensor, tokens: Tensor) -> Tensor:
        self.num_taken += 1
        return self.network.extended(self.slots, output, tokens, self.num_taken - 1)


def _packed(params: Mapping[str, Tensor]) -> HeadMatrices:
    matrices = {n: t.detach() for n, t in params.items() if t.dim() == 2}
    norms = {n: t.detach().float().contiguous() for n, t in params.items() if t.dim() == 1}
    with training_team() as team:
        packed = {name: pack(team, matrix.bfloat16()) for name, matrix in matrices.items()}
    return HeadMatrices(packed, norms)
