"""The compiled gradient of attention over sequences of rows: attention_gradient.c.

Axes: T rows, N entries, S sequences, Hq/Hkv heads, Dh head size.
"""

import ctypes as c
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.architectures.blocks import Scoring
from tinkercloud.embedded.native.structures import AttentionGradient
from tinkercloud.embedded.native.train_bindings import training_team


@dataclass(frozen=True, slots=True)
class Entries:
    """The rows of sequences behind each other: of sequence s, from starts[s] up to starts[s + 1].

    starts int64 (S + 1,). rows int64 (N,): of q, k, v and dout, each in at least one sequence.
    out_rows int64 (N,): of the gradients, each in one. owned bool (N,): where an entry has no
    gradient of the result, although its row has; None: all have.
    """

    starts: NDArray[np.int64]
    rows: NDArray[np.int64]
    out_rows: NDArray[np.int64]
    owned: NDArray[np.bool_] | None


def attention_gradient(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    entries: Entries,
    scoring: Scoring,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Write dq, dk and dv of causal attention (`architectures.layers.attend`) to `into`, float32.

    inputs: q (T, Hq, Dh), k and v (T, Hkv, Dh), in the model's type, and the gradient of the result
    (T, Hq, Dh), float32. The gradients are shaped likewise. In memory all may have gaps between
    rows. A sequence's gradients depend on its entries alone, to the bit. Raises MemoryError.
    """
    q, k, v, dout = inputs
    assert q.dtype == k.dtype == v.dtype
    assert all(x.dtype == torch.float32 for x in (dout, *into))
    places = (entries.starts, entries.rows, entries.out_rows)
    assert all(array.dtype == np.int64 and array.flags.c_contiguous for array in places)
    request = AttentionGradient(
        *(q.dtype == torch.bfloat16, len(entries.starts) - 1, q.shape[1], *k.shape[1:]),
        *(scoring.window, scoring.scale, scoring.cap),
        *(x.data_ptr() for x in inputs),
        *map(_row_stride, inputs),
        *(x.data_ptr() for x in into),
        *map(_row_stride, into),
        *(array.ctypes.data for array in places),
        None if entries.owned is None else entries.owned.ctypes.data,
    )
    with training_team() as team:
        if team.library.attention_gradient(team.handle, c.byref(request)):
            longest = int(np.diff(entries.starts).max())
            raise MemoryError(f"no memory for the gradient of attention over {longest} tokens")


def _row_stride(x: Tensor) -> int:
    """Of (T, H, Dh), whose rows have no gaps."""
    assert x.stride()[1:] == (x.shape[2], 1)
    return x.stride(0)
