"""What an architecture's forward pass reads its weights through when it samples.

Axes: T packed rows (several sequences, no padding between them), M = T padded to ROW_TILE,
D hidden, Hq/Hkv heads, Dh head size, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinkercloud.architectures.blocks import Scoring
from tinkercloud.embedded.forward.row_invariance import Product, pad_rows
from tinkercloud.embedded.model.uploads import uploaded
from tinkercloud.weights.adapters import Adapter


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one adapter. rows None: all rows of the batch; else int64 indices, padded to a
    multiple of ROW_TILE by repeating the first, `num_rows` of them real."""

    adapter: Adapter
    scale: float
    rows: Tensor | None
    num_rows: int


def segments_of(
    adapters: Sequence[tuple[Adapter, float] | None], device: torch.device
) -> list[Segment]:
    """Group rows by adapter; rows with None read the bare base."""
    by_adapter: dict[int, list[int]] = {}
    for row, entry in enumerate(adapters):
        if entry is not None:
            by_adapter.setdefault(id(entry[0]), []).append(row)
    segments = []
    for rows in by_adapter.values():
        adapter, scale = adapters[rows[0]]  # type: ignore[misc]
        if len(rows) == len(adapters):
            segments.append(Segment(adapter, scale, None, len(rows)))
            continue
        padded = rows + [rows[0]] * (pad_rows(len(rows)) - len(rows))
        index = uploaded(np.array(padded, np.int64), device)
        segments.append(Segment(adapter, scale, index, len(rows)))
    return segments


class SampleContext:
    """Reads the weights of published versions for a batch of rows; subclasses give attention.

    product: computes every matrix product with a weight or an adapter's factor."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        segments: Sequence[Segment],
        product: Product = F.linear,
    ):
        self._base = weights
        self._segments = segments
        self._product = product

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = self._product(x, self._base[name], self._base.get(f"{name}.bias"))
        for segment in self._segments:
            if name not in segment.adapter:
                continue
            a, b = segment.adapter[name]
            if segment.rows is None:
                y += self._lora_delta(x, a, b, segment.scale)
            else:
                delta = self._lora_delta(x[segment.rows], a, b, segment.scale)
                real = segment.num_rows
                y[segment.rows[:real]] += delta[:real]
        return y

    def _lora_delta(self, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """(alpha / rank) B A x (T, out), float32; x (T, in). PEFT too rounds it only when added."""
        return self._product(self._product(x.float(), a), b) * scale

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self._base["model.embed_tokens"])

    def norm_weight(self, name: str) -> Tensor:
        return self._base[name]

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        raise AssertionError("a SampleContext is used through its subclasses")
