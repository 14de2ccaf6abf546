"""Who may be drawn, found where the logits are: of each row a few numbers leave the device.

Scores are computed as `sampler._sample` does, but a device's logarithm may differ from the host's
in its last bits; so all tokens are named whose score is within a margin of the largest, and the
host computes theirs anew. Tokens are those of the plain way.

Axes: B rows, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tinkercloud.decoding.philox import random_words
from tinkercloud.decoding.sampler import RowParams, Scanned, lowest_argmax

CANDIDATES = 16  # of one row; with more, the row is drawn the plain way
MARGIN, MARGIN_OF_SCORE = 1e-4, 1e-6
"""Far above what two right logarithms of float32 make of one number, and the sum's last bit."""


def scan(logits: Tensor, rows: Sequence[RowParams]) -> Scanned:
    """A `sampler.Scan` for logits (B, V) on any device."""
    device, size = logits.device, logits.shape[-1]
    weights = logits.float() / _column([r.temperature or 1.0 for r in rows], device)
    weights = _cut(weights, rows)
    peak = weights.amax(-1, keepdim=True)
    sums = torch.exp(weights - peak).sum(-1, dtype=torch.float64)
    norm = sums.log() + peak[:, 0].double()
    best = lowest_argmax(weights).clamp(max=size - 1)  # of a row of NaN there is none
    words = random_words([(r.seed, r.sample_index, r.position) for r in rows], size, device)
    scores = weights + _noise(words)
    values, ids = scores.topk(min(CANDIDATES + 1, size))
    margin = MARGIN + MARGIN_OF_SCORE * values[:, :1].abs()
    count = (values >= values[:, :1] - margin).sum(-1)
    drawn = _column([r.temperature > 0 for r in rows], device)[:, 0]
    count = torch.where(drawn, count, 0)
    columns = (best[:, None], norm.view(torch.int64)[:, None], count[:, None])
    found = torch.cat((*columns, ids, words.gather(-1, ids)), -1).cpu().numpy()
    return _read(found, ids.shape[1])


def _read(found: np.ndarray, width: int) -> Scanned:
    count = found[:, 2].copy()
    count[count > CANDIDATES] = -1
    ids, words = found[:, 3 : 3 + width], found[:, 3 + width :]
    norm = np.ascontiguousarray(found[:, 1]).view(np.float64)
    return Scanned(found[:, 0], norm, count, ids, words.astype(np.uint32))


def _noise(words: Tensor) -> Tensor:
    """`sampler.noise_of` on the device."""
    u = (words.float() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-u))


def _cut(weights: Tensor, rows: Sequence[RowParams]) -> Tensor:
    """-inf for what top-k and top-p leave out."""
    cut = [i for i, r in enumerate(rows) if r.temperature > 0 and (r.top_k > 0 or r.top_p < 1.0)]
    if not cut:
        return weights
    at = torch.tensor(cut, device=weights.device)
    own = weights[at]
    kept = keep_masks(own, [rows[i].top_k for i in cut], [rows[i].top_p for i in cut])
    weights[at] = own.masked_fill(~kept, float("-inf"))
    return weights


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
