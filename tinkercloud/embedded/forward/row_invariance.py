"""Whether PyTorch's matrix products are row-invariant on this processor: whether a row of the
result has the same bits however many rows are multiplied with it.

A BLAS chooses its kernel, and with it the order of a sum, by the number of rows. In whole tiles of
rows that makes no difference on some processors and does on others (MKL's float32 on Intel's, AMX's
bfloat16), so it is measured, once for each number type and number of threads.

Axes: M rows, K inputs, N outputs.
"""

import logging
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

ROW_TILE = 8
"""Matrix products of sampler and trainer get a multiple of this many rows. Where products are
row-invariant at all they are so in whole tiles: the kernels for fewer rows differ everywhere."""

PROBED_SHAPES = ((576, 1536), (1536, 576), (576, ROW_TILE))
"""(K, N): into and out of a wide layer, and down to a low rank. Long sums, because a BLAS splits
those first; and many outputs as well as few, because threads share either outputs or the sum."""
PROBED_ROWS = (8, 16, 24, 40, 136)
MOST_ROWS = 256  # with which the others are compared


class Product(Protocol):
    """What `torch.nn.functional.linear` computes: x (M, K), weight (N, K), bias (N,) -> (M, N)."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor: ...


def pad_rows(num_rows: int) -> int:
    """The next multiple of ROW_TILE."""
    return -(-num_rows // ROW_TILE) * ROW_TILE


def is_row_invariant(dtype: torch.dtype, product: Product = F.linear) -> bool:
    """Of products of this type on the CPU, in whole tiles of rows, with as many threads as PyTorch
    has now. The first call for a type measures it, in some tens of milliseconds."""
    return _measured(dtype, product, torch.get_num_threads())


def verdicts(dtype: torch.dtype) -> dict[str, bool]:
    """By name, of the types that passes over weights of this type multiply in."""
    types = dict.fromkeys((dtype, torch.float32))  # adapters' products are float32 always
    return {str(each).removeprefix("torch."): is_row_invariant(each) for each in types}


def log_row_invariance(dtype: torch.dtype) -> None:
    """The verdicts as a line of the log."""
    shown = [f"{n}: {'' if v else 'not '}row-invariant" for n, v in verdicts(dtype).items()]
    logger.info("PyTorch's products on this processor: %s", ", ".join(shown))


@cache
def _measured(dtype: torch.dtype, product: Product, num_threads: int) -> bool:
    """num_threads: a BLAS also splits a product by it."""
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for k, n in PROBED_SHAPES:
            weight = torch.rand(n, k, generator=generator).sub_(0.5).to(dtype)
            for way in (weight, weight.t()):  # of a forward pass, and of its backward pass
                x = torch.rand(MOST_ROWS, way.shape[1], generator=generator).sub_(0.5).to(dtype)
                if not has_equal_rows(product, x, way):
                    return False
    return True


def has_equal_rows(
    product: Product, x: Tensor, weight: Tensor, counts: tuple[int, ...] = PROBED_ROWS
) -> bool:
    """Whether the last rows of x (M, K), as many as each count says, have the bits that they have
    among all M."""
    whole = product(x, weight)
    return all(torch.equal(product(x[-count:], weight), whole[-count:]) for count in counts)
