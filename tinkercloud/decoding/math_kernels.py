"""Elementwise functions of PyTorch on a CPU, ready before several threads call them."""

from functools import cache

import torch

FUNCTIONS = (
    *("acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1"),
    *("floor", "lgamma", "log", "log10", "log1p", "log2", "round", "rsqrt", "sigmoid", "sin"),
    *("sinh", "sqrt", "tan", "tanh", "trunc"),
)


@cache
def resolve_math_kernels() -> None:
    """Call every elementwise function once, from one thread, on one number of each type.

    To be called at the start of a process that computes, before it computes anything. MKL chooses
    the kernel of a function at its first call. Where several threads make that first call at once,
    one of them may compute its share with a kernel of low accuracy (thousands of units in the last
    place), this once: pytorch/pytorch#188792. Rotary angles that came of it were off by 1.5e-4 for
    the life of a process, and log-probabilities by up to 8e-3.
    """
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype)
        for name in FUNCTIONS:
            getattr(torch, name)(number)
