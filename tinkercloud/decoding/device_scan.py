"""Who may be drawn, found where the logits are: of each row a few numbers leave the device.

Scores are computed as `sampler._sample` does, but a device's logarithm may differ from the host's
in its last bits; so all tokens are named whose score is within a margin of the largest, and the
host computes theirs anew. Tokens are those of the plain way.

Axes: B rows, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.decoding.philox import random_words
from tinkercloud.decoding.sampler import RowParams, Scanned, lowest_argmax

CANDIDATES = 16  # of one row; with more, the row is drawn the plain way
MARGIN, MARGIN_OF_SCORE = 1e-4, 1e-6
"""Far above what two right logarithms of float32 make of one number, and the sum's last bit."""


def scan(logits: Tensor, rows: Sequence[RowParams]) -> Scanned:
    """A `sampler.Scan` for logits (B, V) on any device. Rows that are not plain come out wrong."""
    params = torch.from_numpy(packed(rows)).to(logits.device)
    weights = _weights(logits, params)
    cut = [i for i, row in enumerate(rows) if row.is_plain and row.is_cut]
    if cut:
        at = torch.tensor(cut, device=weights.device)
        warped, limits = weights[at], [rows[i].params for i in cut]
        kept = keep_masks(warped, [p.top_k for p in limits], [p.top_p for p in limits])
        weights[at] = warped.masked_fill(~kept, float("-inf"))
    return read(_find(weights, params).cpu().numpy())


def packed(rows: Sequence[RowParams]) -> NDArray[np.int64]:
    """What `find` has to know of the rows, (B, 4): seed, sample index, position, temperature."""
    out = np.empty((len(rows), 4), np.int64)
    seeds = np.array([row.params.seed for row in rows], np.uint64)
    out[:, 0] = seeds.view(np.int64)
    out[:, 1] = [row.sample_index for row in rows]
    out[:, 2] = [row.position for row in rows]
    out[:, 3] = np.array([row.params.temperature for row in rows], np.float64).view(np.int64)
    return out


def find(logits: Tensor, params: Tensor) -> Tensor:
    """For rows without top-k and top-p: what `read` reads, int64. Only shapes decide what runs, and
    nothing is read on the host: a CUDA graph can hold it. params: of `packed`, on the device."""
    return _find(_weights(logits, params), params)


def read(packed_rows: NDArray[np.int64]) -> Scanned:
    """What `find` has put side by side (B, 3 + 2 k)."""
    width = (packed_rows.shape[1] - 3) // 2
    count = packed_rows[:, 2].copy()
    count[count > CANDIDATES] = -1
    ids, words = packed_rows[:, 3 : 3 + width], packed_rows[:, 3 + width :]
    norm = np.ascontiguousarray(packed_rows[:, 1]).view(np.float64)
    return Scanned(packed_rows[:, 0].copy(), norm, count, ids, words.astype(np.uint32))


def noise_at(params: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """`sampler.gumbel_noise_at` on the device, but for the last bits of its logarithms: the entries
    `ids` int64 (k,) of each row's noise, float32 (B, k). params: of `packed`."""
    return _noise(random_words(params[:, :3].contiguous(), vocab_size)[:, ids])


def _temperatures(params: Tensor) -> Tensor:
    return params[:, 3:].contiguous().view(torch.float64)


def _weights(logits: Tensor, params: Tensor) -> Tensor:
    temperatures = _temperatures(params)
    divisors = torch.where(temperatures > 0, temperatures, 1.0)
    return logits.float() / divisors.float()


def _find(weights: Tensor, params: Tensor) -> Tensor:
    size = weights.shape[-1]
    peak = weights.amax(-1, keepdim=True)
    sums = torch.exp(weights - peak).sum(-1, dtype=torch.float64)
    norm = sums.log() + peak[:, 0].double()
    best = lowest_argmax(weights).clamp(max=size - 1)  # of a row of NaN there is none
    words = random_words(params[:, :3].contiguous(), size)
    values, ids = (weights + _noise(words)).topk(min(CANDIDATES + 1, size))
    margin = MARGIN + MARGIN_OF_SCORE * values[:, :1].abs()
    count = (values >= values[:, :1] - margin).sum(-1)
    count = torch.where(_temperatures(params)[:, 0] > 0, count, 0)
    columns = (best[:, None], norm.view(torch.int64)[:, None], count[:, None])
    return torch.cat((*columns, ids, words.gather(-1, ids)), -1)


def _noise(words: Tensor) -> Tensor:
    """`sampler.noise_of` on the device."""
    u = (words.float() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-u))


def keep_masks(weights: Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> Tensor:
    """`sampler.keep_mask` of every row, bool (B, V)."""
    values, order = torch.sort(weights, descending=True, stable=True)
    size = weights.shape[-1]
    limits = _column([k if k > 0 else size for k in top_k], weights.device)
    inside = torch.arange(size, device=weights.device) < limits
    probs = torch.softmax(values.double().masked_fill(~inside, float("-inf")), -1)
    before = probs.cumsum(-1) - probs
    least = _column([p if p < 1.0 else float("inf") for p in top_p], weights.device, torch.float64)
    return torch.zeros_like(inside).scatter_(-1, order, inside & (before < least))


def _column(
    numbers: Sequence[float], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    return torch.tensor(numbers, device=device, dtype=dtype)[:, None]
