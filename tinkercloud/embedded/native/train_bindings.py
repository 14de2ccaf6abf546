"""The compiled parts of a training pass's backward half that go row by row: train_rows.c.

They read what the compiled forward pass has kept (layered_pass.py), in the model's number type;
gradients, and what lies between layers, are float32. What a product of the forward pass has read is
computed again to the bit, before it was rounded.

Tensors are contiguous, unless said otherwise; T rows, D columns.
"""

import ctypes as c
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock

import torch
from torch import Tensor

from tinkercloud.embedded.native.compiler import library
from tinkercloud.embedded.native.structures import ACTIVATIONS
from tinkercloud.embedded.native.team import Team

DTYPES = (torch.float32, torch.bfloat16)


def has_compiled_pass(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a model of this type on this device is trained by the compiled pass."""
    return device.type == "cpu" and dtype in DTYPES and library() is not None


def norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The root-mean-square norm of x (..., D), float32, and what rows were multiplied with
    (..., 1)."""
    out, inverse = torch.empty_like(x), torch.empty(*x.shape[:-1], 1)
    with training_team() as team:
        team.library.norm(team.handle, *_sizes(x), _at(x), _at(weight), eps, _at(out), _at(inverse))
    return out, inverse


def norm_gradient(x: Tensor, inverse: Tensor, weight: Tensor, dy: Tensor, into: Tensor) -> None:
    """Adds the gradient of x (..., D) to `into`; inverse (..., 1)."""
    with training_team() as team:
        team.library.norm_gradient(
            *(team.handle, *_sizes(x)),
            *(_at(x), _at(inverse), _at(weight), _at(dy), _at(into)),
        )


def gated(activation: str, gates: Tensor) -> Tensor:
    """The activation of gate, times up (T, D), float32; gates (T, 2 D), gate and up side by side,
    in the model's type."""
    num_rows, width = gates.shape[0], gates.shape[1] // 2
    product = torch.empty(num_rows, width)
    with training_team() as team:
        start = (team.handle, _is_narrow(gates), ACTIVATIONS.index(activation), num_rows, width)
        team.library.gated_product(*start, _at(gates, gates.dtype), _at(product))
    return product


def gated_gradient(activation: str, gates: Tensor, dproduct: Tensor) -> Tensor:
    """The gradient of gates (T, 2 D) from that of their gated product (T, D), float32."""
    dgates = torch.empty(gates.shape)
    with training_team() as team:
        start = (team.handle, _is_narrow(gates), ACTIVATIONS.index(activation))
        arrays = (_at(gates, gates.dtype), _at(dproduct), _at(dgates))
        team.library.gated_product_gradient(*start, *_sizes(dproduct), *arrays)
    return dgates


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> None:
    """`architectures.layers.rotate` in place: x (T, H, Dh) float32, with or without gaps between
    rows; cos and sin (T, R / 2)."""
    num_rows, heads, size = x.shape
    assert x.stride()[1:] == (size, 1)
    assert x.dtype == torch.float32
    with training_team() as team:
        team.library.rotate(
            *(team.handle, num_rows, heads, size, x.stride(0), x.data_ptr()),
            *(_at(cos), _at(sin), 2 * cos.shape[1], interleaved),
        )


def to_probabilities_(logits: Tensor, norms: Tensor) -> None:
    """In place exp(logit - norm of its row): logits (T, D), norms float64 (T,)."""
    with training_team() as team:
        team.library.probabilities(
            *(team.handle, *_sizes(logits), _at(logits), _at(norms, torch.float64))
        )


_lock = Lock()


@contextmanager
def training_team() -> Iterator[Team]:
    """As many threads as PyTorch has; they do one job at a time, whoever asks."""
    with _lock:
        yield _team_of(torch.get_num_threads())


@cache
def _team_of(num_threads: int) -> Team:
    team = Team(num_threads)
    pointer, number = c.c_void_p, c.c_int64
    start = (pointer, number, number)  # team, rows, columns
    typed = (pointer, number, number, number)  # team, is_narrow, rows, columns
    loaded = team.library
    loaded.attention_gradient.argtypes = (pointer, pointer)
    loaded.norm.argtypes = (*start, pointer, pointer, c.c_float, pointer, pointer)
    loaded.norm_gradient.argtypes = (*start, *[pointer] * 5)
    loaded.gated_product.argtypes = (*typed, number, pointer, pointer)
    loaded.gated_product_gradient.argtypes = (*typed, number, *[pointer] * 3)
    loaded.rotate.argtypes = (*typed, number, *[pointer] * 3, number, number)
    loaded.probabilities.argtypes = (*start, pointer, pointer)
    return team


def _is_narrow(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def _sizes(x: Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[-1], x.shape[-1]


def _at(x: Tensor, dtype: torch.dtype = torch.float32) -> int:
    assert x.is_contiguous()
    assert x.dtype == dtype
    return x.data_ptr()
