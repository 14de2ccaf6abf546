"""The protobuf side of the API."""

import math

import numpy as np
from numpy.typing import NDArray

MAX_TENSOR_ELEMENTS = 2**28


class WireError(ValueError):
    """Bytes or tensors that do not follow the wire specification; the text says what is wrong."""


def densify_csr(
    values: NDArray,
    crow_indices: NDArray[np.int64],
    col_indices: NDArray[np.int64],
    shape: tuple[int, ...],
) -> NDArray:
    """A dense array of `shape` (rows, columns) from CSR parts; unlisted entries are 0.

    Raises WireError on inconsistent parts and on shapes above MAX_TENSOR_ELEMENTS.
    """
    if len(shape) != 2 or min(shape) < 0:
        raise WireError(f"a sparse tensor needs a shape of two sizes, got {list(shape)}")
    if math.prod(shape) > MAX_TENSOR_ELEMENTS:
        raise WireError(f"sparse shape {list(shape)} exceeds {MAX_TENSOR_ELEMENTS} elements")
    rows, columns = shape
    if len(crow_indices) != rows + 1 or crow_indices[0] != 0:
        raise WireError(f"crow_indices must be {rows + 1} numbers that start at 0")
    # In bounds first: differences of arbitrary int64 numbers may wrap around.
    if bool(np.any((crow_indices < 0) | (crow_indices > len(values)))):
        raise WireError(f"crow_indices must lie in 0..{len(values)}")
    counts = np.diff(crow_indices)
    if bool(np.any(counts < 0)):
        raise WireError("crow_indices must not decrease")
    if crow_indices[-1] != len(values) or len(col_indices) != len(values):
        raise WireError("crow_indices, col_indices and values of a sparse tensor disagree")
    if bool(np.any((col_indices < 0) | (col_indices >= columns))):
        raise WireError(f"col_indices must lie in 0..{columns - 1}")
    dense = np.zeros(shape, dtype=values.dtype)
    dense[np.repeat(np.arange(rows), counts), col_indices] = values
    return dense
