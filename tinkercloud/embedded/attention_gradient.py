"""The gradient of causal attention, by attention_gradient.c where there is a C compiler.

PyTorch's kernel for CPUs takes 2 to 3 times as long, and in bfloat16 rounds in between.

Axes: B sequences of L rows each, Hq/Hkv query and key/value heads, Dh head size.
"""

import ctypes as c
from functools import cache
from threading import Lock

import torch
from torch import Tensor

from tinkercloud.embedded.native import Team, library

_DTYPES = (torch.float32, torch.bfloat16)


class _Gradient(c.Structure):
    _fields_ = (
        *(
            (name, c.c_int64)
            for name in ("is_narrow", "batch", "length", "heads", "kv_heads", "head_dim")
        ),
        ("scale", c.c_float),
        *((name, c.c_void_p) for name in ("q", "k", "v", "dout")),
        *((name, c.c_int64) for name in ("q_row", "k_row", "v_row", "dout_row")),
        *((name, c.c_void_p) for name in ("dq", "dk", "dv")),
    )


def is_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `attention_gradient` can be called with such tensors."""
    return device.type == "cpu" and dtype in _DTYPES and library() is not None


def attention_gradient(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of `scaled_dot_product_attention(q, k, v, is_causal=True)`, whose gradient is
    dout. q and dout (B, Hq, L, Dh), k and v (B, Hkv, L, Dh); all of one type, in memory (B, L, H,
    Dh), with or without gaps between rows. Sums are float32. Raises MemoryError."""
    batch, heads, length, size = q.shape
    kv_heads = k.shape[1]
    given = [_by_rows(x) for x in (q, k, v, dout)]
    made = [torch.empty(batch, length, h, size, dtype=q.dtype) for h in (heads, kv_heads, kv_heads)]
    asked = _Gradient(
        *(q.dtype == torch.bfloat16, batch, length, heads, kv_heads, size, size**-0.5),
        *(x.data_ptr() for x in given),
        *(x.stride(1) for x in given),
        *(x.data_ptr() for x in made),
    )
    with _lock:  # a team does one job at a time
        team = _team(torch.get_num_threads())
        if team.library.attention_gradient(team.handle, c.byref(asked)):
            raise MemoryError(f"no memory for attention over {length} tokens")
    dq, dk, dv = (x.transpose(1, 2) for x in made)
    return dq, dk, dv


_lock = Lock()


@cache
def _team(num_threads: int) -> Team:
    return Team(num_threads)


def _by_rows(x: Tensor) -> Tensor:
    """(B, H, L, Dh) -> (B, L, H, Dh), whose rows lie behind each other."""
    assert x.device.type == "cpu" and x.dtype in _DTYPES
    rows = x.transpose(1, 2)
    _, length, heads, size = rows.shape
    lies_so = rows.stride()[2:] == (size, 1) or heads == 1
    follow = rows.shape[0] == 1 or rows.stride(0) == length * rows.stride(1)
    return rows if lies_so and follow else rows.contiguous()
