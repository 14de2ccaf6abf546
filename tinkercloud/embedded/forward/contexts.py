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

from tinkercloud.embedded.model.uploads import uploaded
from tinkercloud.weights.adapters import Adapter

ROW_TILE = 8
"""Matrix products of sampler and trainer get a multiple of this many rows. A BLAS picks its kernel
by the number of rows; with whole tiles a row's result does not depend on how many rows come with it
(`tests/decoding/test_sampler.py` measures this on the machine at hand)."""


def pad_rows(num_rows: int) -> int:
    """The next multiple of ROW_TILE."""
    return -(-num_rows // ROW_TILE) * ROW_TILE


def lora_delta(x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """(alpha / rank) B A x (T, out), float32; x (T, in). Rounded only when added, as PEFT does."""
    return F.linear(F.linear(x.float(), a), b) * scale


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
    """Reads the weights of published versions for a batch of rows; subclasses give attention."""

    def __init__(self, weights: Mapping[str, Tensor], segments: Sequence[Segment]):
        self._base = weights
        self._segments = segments

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = F.linear(x, self._base[name], self._base.get(f"{name}.bias"))
        for segment in self._segments:
            if name not in segment.adapter:
                continue
            a, b = segment.adapter[name]
            if segment.rows is None:
                y += lora_delta(x, a, b, segment.scale)
            else:
                delta = lora_delta(x[segment.rows], a, b, segment.scale)
                real = segment.num_rows
                y[segment.rows[:real]] += delta[:real]
        return y

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self._base["model.embed_tokens"])

    def norm_weight(self, name: str) -> Tensor:
        return self._base[name]

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise AssertionError("a SampleContext is used through its subclasses")
