"""The compiled parts of a training pass on CPUs: attention_gradient.c and train_rows.c.

PyTorch's steps go over memory up to eight times where one of these goes once; its gradient of
attention takes two to three times as long, and in bfloat16 rounds in between. What is a forward
pass's own value is rounded as PyTorch rounds it, bit by bit.

Tensors are contiguous and float32 or bfloat16, unless said otherwise; T rows, D columns.
"""

import ctypes as c
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock

import torch
from torch import Tensor

from tinkercloud.embedded.native.compiler import library
from tinkercloud.embedded.native.structures import AttentionGradient
from tinkercloud.embedded.native.team import Team

DTYPES = (torch.float32, torch.bfloat16)


def can_take(*tensors: Tensor) -> bool:
    """Whether the functions here can be called with them: on a CPU, of one such type."""
    first = tensors[0]
    if first.device.type != "cpu" or first.dtype not in DTYPES or library() is None:
        return False
    return all(x.dtype == first.dtype and x.is_contiguous() for x in tensors)


def attention_gradient(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of `scaled_dot_product_attention(q, k, v, is_causal=True)`, whose gradient is
    dout. q and dout (B, Hq, L, Dh), k and v (B, Hkv, L, Dh): B sequences of L rows; in memory
    (B, L, H, Dh), with or without gaps between rows. Sums are float32. Raises MemoryError."""
    batch, heads, length, size = q.shape
    kv_heads = k.shape[1]
    inputs = [_by_rows(x) for x in (q, k, v, dout)]
    gradients = [
        torch.empty(batch, length, h, size, dtype=q.dtype) for h in (heads, kv_heads, kv_heads)
    ]
    request = AttentionGradient(
        *(_is_narrow(q), batch, length, heads, kv_heads, size, size**-0.5),
        *(x.data_ptr() for x in inputs),
        *(x.stride(1 if length > 1 else 0) for x in inputs),
        *(x.data_ptr() for x in gradients),
    )
    with _team() as team:
        if team.library.attention_gradient(team.handle, c.byref(request)):
            raise MemoryError(f"no memory for the gradient of attention over {length} tokens")
    dq, dk, dv = (x.transpose(1, 2) for x in gradients)
    return dq, dk, dv


def norm_scaled(x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    """weight * (x * inverse), rounded in between. x (..., D), inverse (..., 1) float32."""
    out = torch.empty_like(x)
    with _team() as team:
        team.library.norm_scaled(
            *(team.handle, _is_narrow(x), *_sizes(x)),
            *(_at(x), _at(inverse, torch.float32), _at(weight), _at(out)),
        )
    return out


def norm_gradient(x: Tensor, inverse: Tensor, weight: Tensor, dy: Tensor, into: Tensor) -> None:
    """Adds the gradient of x (..., D) to `into`; inverse (..., 1) float32."""
    with _team() as team:
        team.library.norm_gradient(
            *(team.handle, _is_narrow(x), *_sizes(x)),
            *(_at(x), _at(inverse, torch.float32), _at(weight), _at(dy), _at(into)),
        )


def swiglu(gates: Tensor) -> Tensor:
    """silu(gate) * up (T, D); gates (T, 2 D), gate and up side by side."""
    num_rows, width = gates.shape[0], gates.shape[1] // 2
    product = gates.new_empty(num_rows, width)
    with _team() as team:
        start = (team.handle, _is_narrow(gates), num_rows, width)
        team.library.swiglu(*start, _at(gates), _at(product))
    return product


def swiglu_gradient(gates: Tensor, dproduct: Tensor) -> Tensor:
    """The gradient of gates (T, 2 D) from that of silu(gate) * up (T, D)."""
    dgates = torch.empty_like(gates)
    with _team() as team:
        start = (team.handle, _is_narrow(gates), *_sizes(dproduct))
        team.library.swiglu_gradient(*start, _at(gates), _at(dproduct), _at(dgates))
    return dgates


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """`architectures.layers.rotate` in place: x (T, H, Dh), with or without gaps between rows; cos
    and sin (T, Dh / 2) float32."""
    num_rows, heads, size = x.shape
    assert x.stride()[1:] == (size, 1)
    with _team() as team:
        team.library.rotate(
            *(team.handle, _is_narrow(x), num_rows, heads, size, x.stride(0), x.data_ptr()),
            *(_at(cos, torch.float32), _at(sin, torch.float32)),
        )


def softmax(logits: Tensor, out: Tensor) -> Tensor:
    """Writes the probabilities of logits (T, D) to `out`, float32, which may be the same tensor;
    returns the log of what they were divided by (T,)."""
    normalizers = torch.empty(len(logits))
    with _team() as team:
        team.library.softmax(
            *(team.handle, _is_narrow(logits), *_sizes(logits)),
            *(_at(logits), _at(out, torch.float32), _at(normalizers)),
        )
    return normalizers


_lock = Lock()


@contextmanager
def _team() -> Iterator[Team]:
    """As many threads as PyTorch has; they do one job at a time, whoever asks."""
    with _lock:
        yield _team_of(torch.get_num_threads())


@cache
def _team_of(num_threads: int) -> Team:
    team = Team(num_threads)
    pointer, number = c.c_void_p, c.c_int64
    start = (pointer, number, number, number)  # team, is_narrow, rows, columns
    loaded = team.library
    loaded.attention_gradient.argtypes = (pointer, pointer)
    loaded.norm_scaled.argtypes = (*start, *[pointer] * 4)
    loaded.norm_gradient.argtypes = (*start, *[pointer] * 5)
    loaded.swiglu.argtypes = (*start, pointer, pointer)
    loaded.swiglu_gradient.argtypes = (*start, *[pointer] * 3)
    loaded.rotate.argtypes = (*start, number, number, *[pointer] * 3)
    loaded.softmax.argtypes = (*start, *[pointer] * 3)
    return team


def _is_narrow(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def _sizes(x: Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[-1], x.shape[-1]


def _at(x: Tensor, dtype: torch.dtype | None = None) -> int:
    assert x.is_contiguous()
    assert x.dtype == dtype if dtype else x.dtype in DTYPES
    return x.data_ptr()


def _by_rows(x: Tensor) -> Tensor:
    """(B, H, L, Dh) -> (B, L, H, Dh), whose rows lie behind each other."""
    assert x.dtype in DTYPES
    rows = x.transpose(1, 2)
    _, length, heads, size = rows.shape
    lies_so = rows.stride(3) == 1 and (heads == 1 or rows.stride(2) == size)
    follow = 1 in (rows.shape[0], length) or rows.stride(0) == length * rows.stride(1)
    return rows if lies_so and follow else rows.contiguous()
