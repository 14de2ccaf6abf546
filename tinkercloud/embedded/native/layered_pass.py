"""The compiled forward pass cut between layers, for training: what goes on between the parts may
take its time, the activations that the backward half needs are kept, and the bits are those of the
pass in one piece.

Axes: T rows, n some of them, D hidden, F intermediate, Hq/Hkv heads, Dh head size, V vocabulary.
"""

import ctypes as c
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.architectures.config import ArchitectureConfig
from tinkercloud.embedded.native.bindings import AdapterTable, NativeModel
from tinkercloud.embedded.native.scores import Scores, Targets
from tinkercloud.embedded.native.structures import Batch, Kept, Segment
from tinkercloud.embedded.native.team import Team
from tinkercloud.embedded.native.train_bindings import training_team


@dataclass(frozen=True, slots=True)
class Rows:
    """tokens int64, positions int32 (T,); sequence int32 (T,): each row's sequence, whose blocks
    are a row of tables int32 (S, blocks)."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int32]
    sequence: NDArray[np.int32]
    tables: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """What one layer keeps, in the model's number type as products and attention have read it, but
    for middle (T, D), which lies between attention and MLP, for mixed_out and fed_out (T, D), which
    enter the norms after these where there are such, and for raw, q and k before the norms of heads
    where there are such: these are float32. q (T, Hq, Dh), k and v (T, Hkv, Dh), rotated; mixed
    (T, Hq Dh); gates (T, 2 F), gate and up side by side."""

    middle: Tensor
    mixed_out: Tensor | None
    fed_out: Tensor | None
    raw: tuple[Tensor, Tensor] | None
    q: Tensor
    k: Tensor
    v: Tensor
    mixed: Tensor
    gates: Tensor

    @classmethod
    def empty(
        cls, config: ArchitectureConfig, dtype: torch.dtype, num_rows: int
    ) -> "LayerActivations":
        q_shape = (num_rows, config.num_heads, config.head_dim)
        kv_shape = (num_rows, config.num_kv_heads, config.head_dim)
        has_norms, shape = config.qk_norm, (num_rows, config.hidden_size)
        return cls(
            torch.empty(shape),
            torch.empty(shape) if config.norms.after_attention else None,
            torch.empty(shape) if config.norms.after_mlp else None,
            (torch.empty(q_shape), torch.empty(kv_shape)) if has_norms else None,
            torch.empty(q_shape, dtype=dtype),
            torch.empty(kv_shape, dtype=dtype),
            torch.empty(kv_shape, dtype=dtype),
            torch.empty(num_rows, config.num_heads * config.head_dim, dtype=dtype),
            torch.empty(num_rows, 2 * config.intermediate_size, dtype=dtype),
        )

    def addresses(self) -> Kept:
        raw_q, raw_k = (x.data_ptr() for x in self.raw) if self.raw else (None, None)
        outs = (None if x is None else x.data_ptr() for x in (self.mixed_out, self.fed_out))
        numbers = (self.q, self.k, self.v, self.mixed, self.gates)
        return Kept(self.middle.data_ptr(), *outs, raw_q, raw_k, *(x.data_ptr() for x in numbers))


class LayeredPass:
    """One pass over some rows, whose keys and values go to the model's blocks. Its caller goes
    through the layers in order, or again through one of them with the same x."""

    def __init__(
        self,
        model: NativeModel,
        rows: Rows,
        rotary: tuple[Tensor, Tensor],
        segments: Sequence[tuple[int, int, float, AdapterTable]],
        team: Callable[[], AbstractContextManager[Team]] = training_team,
    ):
        """rotary and segments: as in `NativeModel.forward`. team: whose threads each part gets."""
        self._model, self._config, self._team = model, model.config, team
        fields = (rows.tokens, rows.positions, rows.sequence, rows.tables)
        self._arrays = [np.ascontiguousarray(field) for field in fields]
        self._angles = [angle.contiguous() for angle in rotary]
        self._tables = [table for *_, table in segments]  # C reads them
        entries = [(first, num, scale, table.entries) for first, num, scale, table in segments]
        self._segments = (Segment * len(entries))(*entries)

    def embed(self) -> Tensor:
        """(T, D)."""
        x = torch.empty(len(self._arrays[0]), self._config.hidden_size)
        self._run(embeds=1, x=x.data_ptr())
        return x

    def layer(
        self, index: int, x: Tensor, *, keep: bool, hidden: Tensor | None = None
    ) -> LayerActivations | None:
        """x (T, D) float32 becomes what the layer puts out; hidden (T, D): after the last layer,
        gets what the final norm makes of it."""
        assert x.is_contiguous()
        assert x.dtype == torch.float32
        kept = LayerActivations.empty(self._config, self._model.dtype, len(x)) if keep else None
        address = None if kept is None else c.pointer(kept.addresses())
        self._run(
            first_layer=index, end_layer=index + 1, x=x.data_ptr(), kept=address,
            hidden=None if hidden is None else hidden.data_ptr(),
        )  # fmt: skip
        return kept

    def logits(self, hidden: Tensor, rows: NDArray[np.int64], out: Tensor) -> None:
        """Those of some rows, ascending, to `out` float32 (n, V); hidden (T, D)."""
        assert out.is_contiguous()
        assert out.shape == (len(rows), self._config.vocab_size)
        last = self._config.num_layers
        chosen = np.ascontiguousarray(rows)
        self._run(
            first_layer=last, end_layer=last, num_logit_rows=len(rows),
            logit_rows=chosen.ctypes.data, hidden=hidden.data_ptr(), logits=out.data_ptr(),
        )  # fmt: skip

    def scores(self, hidden: Tensor, targets: Targets) -> Scores:
        """Of some rows' targets; hidden (T, D)."""
        last, scores = self._config.num_layers, Scores(targets)
        self._run(
            first_layer=last, end_layer=last, hidden=hidden.data_ptr(),
            scores=c.pointer(scores.request),
        )  # fmt: skip
        return scores

    def _run(self, **part: object) -> None:
        tokens, positions, sequence, tables = self._arrays
        cosine, sine = self._angles
        batch = Batch(
            rows=len(tokens),
            tokens=tokens.ctypes.data,
            positions=positions.ctypes.data,
            sequence=sequence.ctypes.data,
            tables=tables.ctypes.data,
            table_stride=tables.shape[1],
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
            num_segments=len(self._segments),
            segments=self._segments,
            **part,
        )
        with self._team() as team:
            self._model.run(team, batch)
