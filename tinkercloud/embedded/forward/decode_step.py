"""One token for each of up to B sequences, with shapes that do not depend on the batch.

All that changes from step to step lies in one buffer of whole numbers, which is filled before the
step; what runs is the same every time, so that a CUDA graph can hold it. Rows without a sequence
are padding: they write to a spare block that no sequence reads.

Axes: B rows, W blocks of a table, Hq/Hkv heads, Dh head size, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from weakref import ref

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.architectures.blocks import Scoring
from tinkercloud.architectures.layers import Show
from tinkercloud.architectures.llama import Llama
from tinkercloud.embedded.forward.adapter_bank import NO_ADAPTER, AdapterBank
from tinkercloud.embedded.forward.hidden_states import LayerStates
from tinkercloud.embedded.forward.kv_blocks import BLOCK_TOKENS, BlockPool
from tinkercloud.embedded.forward.paged_attention import PagedAttention, scored_by

HEAD = 3  # columns before a row's table: token, position, slot of its adapter


@dataclass(frozen=True, slots=True)
class Inputs:
    """The rows of a step, as views of a buffer int32 (B, HEAD + W), made once a step."""

    tokens: Tensor  # int64 (B,)
    positions: Tensor  # int64 (B,)
    adapters: Tensor  # int32 (B,)
    tables: Tensor  # int32 (B, W)
    lengths: Tensor  # int32 (B,)
    blocks: Tensor  # int64 (B,): where the row's keys and values go
    places: Tensor  # int64 (B,): within that block

    @classmethod
    def of(cls, packed: Tensor) -> "Inputs":
        head, tables = packed[:, :HEAD], packed[:, HEAD:].contiguous()
        positions = head[:, 1].long()
        blocks = tables.gather(1, (positions // BLOCK_TOKENS)[:, None])[:, 0].long()
        return cls(
            tokens=head[:, 0].long(),
            positions=positions,
            adapters=head[:, 2].contiguous(),
            tables=tables,
            lengths=head[:, 1] + 1,
            blocks=blocks,
            places=positions % BLOCK_TOKENS,
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step, on the host. tokens, positions, adapters (B,); tables (B, blocks)."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int32]
    adapters: NDArray[np.int64]
    tables: NDArray[np.int32]

    def packed(self, num_rows: int, width: int, spare_block: int) -> NDArray[np.int32]:
        """The buffer of a step, int32 (num_rows, HEAD + width). Rows past these are padding, which
        writes to the spare block."""
        num_real, num_columns = len(self.tokens), min(width, self.tables.shape[1])
        packed = np.zeros((num_rows, HEAD + width), np.int32)
        packed[:num_real, 0], packed[:num_real, 1] = self.tokens, self.positions
        packed[:num_real, 2] = self.adapters
        packed[:num_real, HEAD : HEAD + num_columns] = self.tables[:, :num_columns]
        packed[num_real:, 2] = NO_ADAPTER
        packed[num_real:, HEAD:] = spare_block
        return packed


@dataclass(frozen=True, slots=True)
class Step(ABC):
    """One set of weights, and how it decodes into one pool. The pool is its owner's, who may free
    its memory: a graph must not keep it."""

    architecture: Llama
    weights: Mapping[str, Tensor]
    pool: "ref[BlockPool]"

    def step(
        self,
        packed: Tensor,
        bank: AdapterBank | None,
        out: Tensor,
        states: LayerStates | None = None,
    ) -> None:
        """Logits of packed (B, HEAD + W) to out (B, V); keys and values to their blocks; the
        outputs of some layers to states. What runs depends on the shapes and these layers alone."""
        pool = self.pool()
        assert pool is not None, "a step into a pool that was freed"
        show = None if states is None else states.show
        out.copy_(self.logits(Inputs.of(packed), pool, bank, show))

    @abstractmethod
    def logits(
        self, inputs: Inputs, pool: BlockPool, bank: AdapterBank | None, show: Show | None
    ) -> Tensor:
        """(B, V)."""


class DecodeContext:
    """An `architectures.layers.Context` for one row of every sequence. bank None: no adapters."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        pool: BlockPool,
        inputs: Inputs,
        bank: AdapterBank | None,
        attend: PagedAttention,
    ):
        self._weights, self._pool, self._inputs = weights, pool, inputs
        self._bank, self._attend = bank, attend

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = F.linear(x, self._weights[name], self._weights.get(f"{name}.bias"))
        if self._bank is not None and name in self._bank:
            y += self._bank.delta(name, x, self._inputs.adapters)
        return y

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self._weights["model.embed_tokens"])

    def norm_weight(self, name: str) -> Tensor:
        return self._weights[name]

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        keys, values, at = self._pool.keys[layer], self._pool.values[layer], self._inputs
        keys[at.blocks, :, :, at.places] = k
        values[at.blocks, :, at.places] = v
        attend = scored_by(self._attend, scoring, q.shape[2])
        return attend(q, keys, values, at.tables, at.lengths)


@dataclass(frozen=True, slots=True)
class DecodeModel(Step):
    """A step by the architecture's own code, for any network."""

    attend: PagedAttention

    def logits(
        self, inputs: Inputs, pool: BlockPool, bank: AdapterBank | None, show: Show | None
    ) -> Tensor:
        context = DecodeContext(self.weights, pool, inputs, bank, self.attend)
        hidden = self.architecture.hidden(context, inputs.tokens, inputs.positions, show)
        return self.architecture.unembed(context, hidden)
