"""The forward half of a training pass through PyTorch, in the model's number type: for GPUs, and
for machines without the compiled kernels.

Axes: T packed rows, n rows of a chunk, D hidden, Dh head size, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.architectures.qwen3 import Qwen3
from tinkercloud.embedded.forward.row_invariance import pad_rows
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.training import rowwise
from tinkercloud.embedded.training.attention import PackedAttention
from tinkercloud.embedded.training.block import (
    BlockActivations,
    Blocks,
    gate_names,
    qkv_names,
)
from tinkercloud.embedded.training.layout import Layout
from tinkercloud.embedded.training.linear import Group, Linears, Segment


class TorchBlocks(Blocks):
    def __init__(
        self, base: BaseModel, layout: Layout, linears: Linears, segments: Sequence[Segment]
    ):
        rotation = base.architecture.rotary(base.tensor(layout.positions))
        super().__init__(base.architecture, linears, segments, rotation, rowwise)
        self._norms_heads = isinstance(base.architecture, Qwen3)
        self._tokens = base.tensor(layout.tokens)
        exact = base.dtype != torch.float32
        num_rows = len(layout.tokens)
        self._attention = PackedAttention(layout.sequences(), num_rows, base.device, exact=exact)

    @property
    def attention(self) -> PackedAttention:
        return self._attention

    def embed(self) -> Tensor:
        return torch.nn.functional.embedding(
            self._tokens, self._linears.weight("model.embed_tokens")
        )

    def forward(
        self, index: int, x: Tensor, *, keep: bool
    ) -> tuple[Tensor, BlockActivations | None]:
        path = f"model.layers.{index}"
        normed, _ = self._norm(f"{path}.input_layernorm", x)
        q, k, v = self._split_heads(self._group(qkv_names(path)).forward(normed))
        q, k, heads = self._norm_heads(path, q, k)
        rowwise.rotate_(q, self._cos, self._sin)
        rowwise.rotate_(k, self._cos, self._sin)
        mixed, attention = self._attention.forward(q, k, v, keep=keep)
        mixed = mixed.flatten(1)
        middle = self._group((f"{path}.self_attn.o_proj",)).forward(mixed)
        middle += x
        normed, _ = self._norm(f"{path}.post_attention_layernorm", middle)
        gates = self._group(gate_names(path)).forward(normed)
        out = self._group((f"{path}.mlp.down_proj",)).forward(rowwise.swiglu(gates))
        out += middle
        if not keep:
            return out, None
        return out, BlockActivations(x, heads, attention, mixed, middle, gates)

    def final_norm(self, x: Tensor) -> Tensor:
        return self._norm("model.norm", x)[0]

    def _norm_heads(
        self, path: str, q: Tensor, k: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        if not self._norms_heads:
            return q, k, None
        new_q, _ = self._norm(f"{path}.self_attn.q_norm", q)
        new_k, _ = self._norm(f"{path}.self_attn.k_norm", k)
        return new_q, new_k, (q, k)


class TorchUnembedding:
    """An `Unembedding`: logits in the weights' number type."""

    def __init__(self, base: BaseModel, linears: Linears, max_rows: int):
        self._linears = linears
        vocab = linears.weight("lm_head").shape[0]
        self.wide = torch.empty(pad_rows(max_rows), vocab, device=base.device)
        is_narrow = base.dtype != torch.float32
        self._logits = self.wide.to(base.dtype) if is_narrow else self.wide

    def inputs(self, hidden: Tensor, rows: Tensor) -> Tensor:
        inputs = hidden.new_zeros(pad_rows(len(rows)), hidden.shape[1])
        inputs[: len(rows)] = hidden[rows]
        return inputs

    def logits(
        self, hidden: Tensor, rows: NDArray[np.int64], inputs: Tensor, segments: Sequence[Segment]
    ) -> Tensor:
        group = Group(self._linears, ("lm_head",), segments)
        return group.forward(inputs, out=self._logits[: len(inputs)])

    def normalize(self, logits: Tensor, *, probabilities: bool) -> Tensor:
        return rowwise.softmax(logits, self.wide[: len(logits)]).double()
