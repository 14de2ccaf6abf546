"""A draft head on the compiled pass (draft_head.c), called with tensors.

Its matrices are bfloat16, whatever the target's are: half of the memory to read is most of a step's
time, and what a head computes changes drafts only.

Axes: T rows, B sequences, K drafted tokens, S states of a row, D hidden, Vd draft vocabulary.
"""

import ctypes as c
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.architectures.config import ArchitectureConfig
from tinkercloud.architectures.layers import rms_norm
from tinkercloud.decoding.sampler import RowParams
from tinkercloud.embedded.native.drawing import draws_of
from tinkercloud.embedded.native.layered_pass import Rows
from tinkercloud.embedded.native.packed import PackedMatrix, num_key_errors
from tinkercloud.embedded.native.structures import (
    ACTIVATIONS,
    MODULES,
    Batch,
    Chains,
    DraftHead,
    Layer,
    Linear,
    Model,
)
from tinkercloud.embedded.native.team import Team


@dataclass(frozen=True, slots=True)
class HeadMatrices:
    """linear: `MODULES` and fuse, norms float32 (D,): by their names in `speculative.head.head`."""

    linear: Mapping[str, PackedMatrix]
    norms: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class FrozenMatrices:
    """The target's: embed [V, D] of either type, unembed bfloat16 [Vd, D]; ids int64 (Vd,),
    ascending: the tokens that can be drafted."""

    embed: PackedMatrix
    unembed: PackedMatrix
    ids: Tensor


@dataclass(frozen=True, slots=True)
class Ends:
    """Where chains begin: behind the outputs (B, D) of the last rows of sequences with so many
    rows, whose tables (B, blocks) have room for more. most: tokens of each chain; of which the
    first is drawn with `first`, the next ones at the next positions, from all that the head
    gives. least_lead: of a token's score over the second best one; with less it is the last of its
    chain."""

    outputs: Tensor
    lengths: Sequence[int]
    tables: NDArray[np.int32]
    first: Sequence[RowParams]
    most: Sequence[int]
    least_lead: float = 0.0

    def __post_init__(self) -> None:
        assert all(row.is_whole for row in self.first)


class NativeHead:
    """keys and values: of one layer, bfloat16 by pairs (network.h). rotary: cosines and sines of
    all positions (P, R / 2)."""

    def __init__(
        self,
        target: ArchitectureConfig,
        matrices: HeadMatrices,
        frozen: FrozenMatrices,
        rotary: tuple[Tensor, Tensor],
        blocks: tuple[Tensor, Tensor],
    ):
        self._target, self._frozen, self._blocks = target, frozen, blocks
        self._rotary = [angle.contiguous() for angle in rotary]
        errors = num_key_errors(target.head_dim, torch.bfloat16)
        self._key_dims = torch.arange(errors).repeat(target.num_kv_heads, 1)
        self._layer = (Layer * 1)()
        self._draft = DraftHead(ids=frozen.ids.data_ptr())
        self.use(matrices)

    def use(self, matrices: HeadMatrices) -> None:
        """Other parameters. What its blocks hold was computed with those before."""
        self._matrices = matrices  # C reads them
        norms = {name: norm.data_ptr() for name, norm in matrices.norms.items()}
        layer, keys_and_values = self._layer[0], [each.data_ptr() for each in self._blocks]
        for place, name in enumerate(MODULES):
            layer.linear[place] = _linear(matrices.linear[name])
        layer.mlp_norm, layer.key_dims = norms["mlp_norm"], self._key_dims.data_ptr()
        layer.keys, layer.values = keys_and_values
        fuse = matrices.linear["fuse"]
        self._draft.fuse = _linear(fuse)
        self._num_states = self._draft.num_states = fuse.shape[1] // self._target.hidden_size
        self._draft.embed_norm = norms["embed_norm"]
        self._draft.feature_norm = norms["feature_norm"]
        self._model = self._structure(norms["norm"])

    def outputs(self, team: Team, rows: Rows, states: Tensor) -> Tensor:
        """The layer's outputs (T, D) for rows with these states (T, S, D) of the target's; their
        keys and values go to the blocks."""
        assert states.shape == (len(rows.tokens), self._num_states, self._target.hidden_size)
        x = torch.empty(len(states), self._target.hidden_size)
        states = states.contiguous()
        self._forward(team, rows, x, states=states.data_ptr())
        return x

    def next_outputs(self, team: Team, rows: Rows, outputs: Tensor) -> Tensor:
        """The same for rows whose features are the outputs (T, D) before them."""
        x = outputs.clone()
        self._forward(team, rows, x)
        return x

    def _forward(self, team: Team, rows: Rows, x: Tensor, states: int | None = None) -> None:
        fields = (rows.tokens, rows.positions, rows.sequence, rows.tables)
        arrays = [np.ascontiguousarray(field) for field in fields]
        tokens, positions, sequence, tables = (array.ctypes.data for array in arrays)
        cosine, sine = (angle.data_ptr() for angle in self._rotary)
        batch = Batch(
            rows=len(rows.tokens), end_layer=1, x=x.data_ptr(), tokens=tokens,
            positions=positions, sequence=sequence, tables=tables,
            table_stride=rows.tables.shape[1], cosine=cosine, sine=sine, states=states,
        )  # fmt: skip
        self._run(team, batch)

    def logits(self, team: Team, outputs: Tensor) -> Tensor:
        """(B, D) -> (B, Vd)."""
        num = len(outputs)
        norm, eps = self._matrices.norms["norm"], self._target.rms_norm_eps
        hidden = rms_norm(outputs, norm, eps).contiguous()
        rows, logits = np.arange(num), torch.empty(num, len(self._frozen.ids))
        batch = Batch(
            rows=num, first_layer=1, end_layer=1, num_logit_rows=num, logit_rows=rows.ctypes.data,
            hidden=hidden.data_ptr(), logits=logits.data_ptr(),
        )  # fmt: skip
        self._run(team, batch)
        return logits

    def chains(self, team: Team, ends: Ends) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens, -1 where none can be drawn, and by how much each one's score leads the second
        best (`speculative.head.draft.confidences_of`), (B, K), K the largest of `most`."""
        num, steps = len(ends.lengths), max(ends.most)
        tokens, leads = np.empty((num, steps), np.int64), np.empty((num, steps), np.float32)
        counts, before = np.array(ends.most, np.int64), np.array(ends.lengths, np.int32)
        outputs, tables = ends.outputs.contiguous(), np.ascontiguousarray(ends.tables)
        cosine, sine = (angle.data_ptr() for angle in self._rotary)
        request = Chains(
            *(num, steps, counts.ctypes.data, outputs.data_ptr(), before.ctypes.data),
            *(tables.ctypes.data, tables.shape[1], cosine, sine, draws_of(ends.first)),
            *(tokens.ctypes.data, leads.ctypes.data, ends.least_lead),
        )
        if team.library.draft_chains(team.handle, c.byref(self._model), c.byref(request)):
            raise MemoryError(f"no memory to draft {num} samples")
        return tokens, leads

    def _run(self, team: Team, batch: Batch) -> None:
        if team.library.forward(team.handle, c.byref(self._model), c.byref(batch)):
            raise MemoryError(f"no memory for {batch.rows} rows of a draft head")

    def _structure(self, final_norm: int) -> Model:
        target, frozen = self._target, self._frozen
        return Model(
            num_layers=1,
            hidden=target.hidden_size,
            heads=target.num_heads,
            kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            inner=self._layer[0].linear[MODULES.index("gate_proj")].out,
            vocab=len(frozen.ids),
            is_narrow=True,
            activation=ACTIVATIONS.index("silu"),
            num_rotated=2 * self._rotary[0].shape[1],
            num_rotary=1,
            key_errors=self._key_dims.shape[1],
            eps=target.rms_norm_eps,
            score_scale=target.head_dim**-0.5,
            embedding_scale=1.0,
            residual_scale=1.0,
            embed=frozen.embed.address,
            embed_width=frozen.embed.width,
            embed_is_narrow=frozen.embed.is_narrow,
            final_norm=final_norm,
            head=_linear(frozen.unembed),
            layers=self._layer,
            draft=c.pointer(self._draft),
        )


def _linear(matrix: PackedMatrix) -> Linear:
    assert matrix.dtype == torch.bfloat16
    return Linear(matrix.address, None, *matrix.shape, matrix.width)
