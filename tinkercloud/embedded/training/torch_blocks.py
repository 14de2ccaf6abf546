"""The forward half of a training pass through PyTorch, in the model's number type: for GPUs, and
for machines without the compiled kernels.

Axes: T packed rows, n rows of a chunk, D hidden, Dh head size, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.architectures.layers import capped
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
from tinkercloud.embedded.training.head import Pairs
from tinkercloud.embedded.training.layout import Layout
from tinkercloud.embedded.training.linear import Group, Linears, Segment
from tinkercloud.embedded.training.rowwise_choice import rowwise_for


class TorchBlocks(Blocks):
    def __init__(
        self, base: BaseModel, layout: Layout, linears: Linears, segments: Sequence[Segment]
    ):
        rotation = base.architecture.rotary(base.tensor(layout.positions))
        super().__init__(
            base.architecture, linears, segments, rotation, rowwise_for(base.device, base.dtype)
        )
        self._tokens = base.tensor(layout.tokens)
        exact = base.dtype != torch.float32
        num_rows = len(layout.tokens)
        self._attention = PackedAttention(layout.sequences(), num_rows, base.device, exact=exact)

    def embed(self) -> Tensor:
        x = torch.nn.functional.embedding(self._tokens, self._linears.weight("model.embed_tokens"))
        scale = self._config.embedding_scale
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype, device=x.device)

    def forward(
        self, index: int, x: Tensor, *, keep: bool
    ) -> tuple[Tensor, BlockActivations | None]:
        path, norms = f"model.layers.{index}", self._config.norms
        normed, _ = self._norm_at(path, norms.before_attention, x)
        q, k, v = self._split_heads(self._group(qkv_names(path)).forward(normed))
        q, k, heads = self._norm_heads(path, q, k)
        self._rotate(index, q, k)
        scoring = self._config.scoring(index)
        mixed, attention = self._attention.forward(q, k, v, scoring, keep=keep)
        mixed = mixed.flatten(1)
        mixed_out = self._group((f"{path}.self_attn.o_proj",)).forward(mixed)
        middle = self._added(path, norms.after_attention, mixed_out)
        middle += x
        normed, _ = self._norm_at(path, norms.before_mlp, middle)
        gates = self._group(gate_names(path)).forward(normed)
        product = self._rowwise.gated(self._config.activation, gates)
        fed_out = self._group((f"{path}.mlp.down_proj",)).forward(product)
        out = self._added(path, norms.after_mlp, fed_out)
        out += middle
        if not keep:
            return out, None
        outs = (
            mixed_out if norms.after_attention else None,
            fed_out if norms.after_mlp else None,
        )
        return out, BlockActivations(x, heads, attention, mixed, middle, gates, outs)

    def _attention_backward(
        self,
        index: int,
        saved: BlockActivations,
        dmixed: Tensor,
        into: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        assert isinstance(saved.attention, list)
        self._attention.backward(saved.attention, dmixed, into)

    def _added(self, path: str, norm: str | None, out: Tensor) -> Tensor:
        """What is added to the residual for what a module has put out; `out` itself where nothing
        is done to it."""
        if self._config.residual_scale != 1.0:
            out *= self._config.residual_scale
        return self._norm_at(path, norm, out)[0]

    def final_norm(self, x: Tensor) -> Tensor:
        return self._norm("model.norm", x)[0]

    def _norm_heads(
        self, path: str, q: Tensor, k: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        if not self._config.qk_norm:
            return q, k, None
        normed = []
        for leaf, x in (("q_norm", q), ("k_norm", k)):
            rows = x.flatten(1) if self._config.qk_norm_spans_heads else x
            normed.append(self._norm(f"{path}.self_attn.{leaf}", rows)[0].view(x.shape))
        return normed[0], normed[1], (q, k)


class TorchUnembedding:
    """An `Unembedding`: logits in the weights' number type."""

    def __init__(self, base: BaseModel, linears: Linears, max_rows: int):
        self._linears, self.cap = linears, base.config.logit_cap
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
        logits = group.forward(inputs, out=self._logits[: len(inputs)])
        return logits.copy_(capped(logits, self.cap)) if self.cap else logits

    def score(
        self, hidden: Tensor, rows: NDArray[np.int64], pairs: Pairs, segments: Sequence[Segment]
    ) -> tuple[Tensor, Tensor]:
        inputs = self.inputs(hidden, torch.from_numpy(rows).to(hidden.device))
        logits = self.logits(hidden, rows, inputs, segments)
        picked = logits[pairs.rows, pairs.ids]  # before `normalize` may write to their memory
        return picked, self.normalize(logits, probabilities=False)

    def normalize(self, logits: Tensor, *, probabilities: bool) -> Tensor:
        return rowwise.softmax(logits, self.wide[: len(logits)]).double()
