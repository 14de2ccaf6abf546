"""The forward half of a training pass on CPUs: the compiled pass that samples, layer by layer. Its
log-probabilities are those that were sampled, to the bit.

Axes: T packed rows, n rows of a chunk, D hidden, Dh head size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.embedded.forward.kv_blocks import BlockPool, kv_layout_of
from tinkercloud.embedded.forward.rotary_table import rotary_table
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.native import train_bindings
from tinkercloud.embedded.native.bindings import NativeModel, log_sum_exp
from tinkercloud.embedded.native.layered_pass import LayeredPass, Rows
from tinkercloud.embedded.native.linear_gradient import Gates, Outputs
from tinkercloud.embedded.native.scores import Targets
from tinkercloud.embedded.training.attention import CompiledAttentionGradient
from tinkercloud.embedded.training.block import BlockActivations, Blocks, gate_names
from tinkercloud.embedded.training.head import Pairs
from tinkercloud.embedded.training.layout import Layout
from tinkercloud.embedded.training.linear import Linears, Segment


class CompiledBlocks(Blocks):
    """Float32 between blocks, whatever the model's type."""

    def __init__(
        self, base: BaseModel, layout: Layout, linears: Linears, segments: Sequence[Segment]
    ):
        positions = torch.from_numpy(layout.positions)
        table = rotary_table(base.architecture, int(layout.positions.max()) + 1)
        rotation = (table[0][positions], table[1][positions])
        super().__init__(base.architecture, linears, segments, rotation, train_bindings)
        self._layout = layout
        self.layers = _layered_pass(base, layout, linears, segments, table)

    @cached_property
    def _attention_gradient(self) -> CompiledAttentionGradient:
        return CompiledAttentionGradient(self._layout.sequences(), len(self._layout.tokens))

    def embed(self) -> Tensor:
        return self.layers.embed()

    def forward(
        self, index: int, x: Tensor, *, keep: bool
    ) -> tuple[Tensor, BlockActivations | None]:
        out = x.clone()
        is_last = index + 1 == self._config.num_layers
        self._hidden = torch.empty_like(x) if is_last else None
        kept = self.layers.layer(index, out, keep=keep, hidden=self._hidden)
        if kept is None:
            return out, None
        attention = (kept.q, kept.k, kept.v)
        outs = (kept.mixed_out, kept.fed_out)
        saved = BlockActivations(x, kept.raw, attention, kept.mixed, kept.middle, kept.gates, outs)
        return out, saved

    def _attention_backward(
        self,
        index: int,
        saved: BlockActivations,
        dmixed: Tensor,
        into: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        assert isinstance(saved.attention, tuple)
        scoring = self._config.scoring(index)
        self._attention_gradient.write((*saved.attention, dmixed), scoring, into)

    def _gates_backward(self, path: str, normed: Tensor, gates: Tensor, dout: Tensor) -> Tensor:
        if not self._linears.fuses:
            return super()._gates_backward(path, normed, gates, dout)
        kept, down = Gates(gates, self._config.activation), self._group((f"{path}.mlp.down_proj",))
        dproduct = down.backward_from(kept, Outputs(down.matrices(), dout, [0]))
        both = self._group(gate_names(path))
        outputs = Outputs(both.matrices(), dproduct, [0, 0], gates=kept)
        return both.backward_from(normed, outputs)

    def final_norm(self, x: Tensor) -> Tensor:
        assert self._hidden is not None, "the last block was computed just now"
        return self._hidden


def _layered_pass(
    base: BaseModel,
    layout: Layout,
    linears: Linears,
    segments: Sequence[Segment],
    rotary: tuple[Tensor, Tensor],
) -> LayeredPass:
    """The blocks of all layers are the same: a layer's keys and values are over with the layer."""
    config = base.config
    tables, num_blocks = layout.block_tables()
    one_layer, blocks = replace(config, num_layers=1), kv_layout_of(base.dtype)
    pool = BlockPool(one_layer, base.dtype, base.device, num_blocks, blocks)
    keys, values = pool.keys * config.num_layers, pool.values * config.num_layers
    assert linears.packed is not None, "packed with the model's weights"
    model = NativeModel(config, linears.packed, keys, values)
    rows = Rows(layout.tokens, layout.positions.astype(np.int32), layout.owners(), tables)
    adapted = [
        (at.start, at.stop - at.start, at.model.scale, at.model.factors)
        for at in segments
        if at.model.factors is not None
    ]
    return LayeredPass(model, rows, rotary, adapted)


class CompiledUnembedding:
    """An `Unembedding`: float32 logits, and the sampler's own log of their sums."""

    def __init__(self, base: BaseModel, blocks: CompiledBlocks, max_rows: int):
        self._layers = blocks.layers
        self.cap = base.config.logit_cap
        self._shape = (max_rows, base.config.vocab_size)
        self._wide: Tensor | None = None

    @property
    def wide(self) -> Tensor:
        """Made when it is needed first."""
        if self._wide is None:
            self._wide = torch.empty(self._shape)
        return self._wide

    def inputs(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return hidden[rows]

    def logits(
        self, hidden: Tensor, rows: NDArray[np.int64], inputs: Tensor, segments: Sequence[Segment]
    ) -> Tensor:
        logits = self.wide[: len(rows)]
        self._layers.logits(hidden, rows, logits)
        return logits

    def score(
        self, hidden: Tensor, rows: NDArray[np.int64], pairs: Pairs, segments: Sequence[Segment]
    ) -> tuple[Tensor, Tensor]:
        starts = np.searchsorted(pairs.rows.numpy(), np.arange(len(rows) + 1))
        targets = Targets(rows, starts, pairs.ids.numpy())
        scores = self._layers.scores(hidden, targets)
        return scores.logits, scores.norms

    def normalize(self, logits: Tensor, *, probabilities: bool) -> Tensor:
        with train_bindings.training_team() as team:
            norms = log_sum_exp(team, logits)
        if probabilities:
            train_bindings.to_probabilities_(logits, norms)
        return norms
