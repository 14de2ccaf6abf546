"""Numbers as bytes: little-endian, C order; dense tensors and CSR.

Everything that comes from outside is checked here before memory is asked for.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkercloud.wire import tinker_pb2 as pb

MAX_ELEMENTS = 2**28
MAX_AXES = 8  # bounds the work of multiplying sizes out

_ITEM_TYPES: dict[int, np.dtype] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_BFLOAT16: np.dtype("<u2"),
}


class WireError(ValueError):
    """Bytes or tensors that do not follow the wire specification; the text says what is wrong."""


def item_type(dtype: int) -> np.dtype:
    """The numpy type of one stored number; bfloat16 is stored as its upper 16 bits."""
    if dtype not in _ITEM_TYPES:
        raise WireError(f"tensor dtype {dtype} is none of float32, int64, int32, bfloat16")
    return _ITEM_TYPES[dtype]


def from_bytes(data: bytes, dtype: int) -> NDArray[Any]:
    """A writable 1-D array: int32 widened to int64, bfloat16 to float32."""
    stored = plain_from_bytes(data, item_type(dtype))
    if dtype == pb.DTYPE_BFLOAT16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32 if dtype == pb.DTYPE_FLOAT32 else np.int64)


def plain_from_bytes(data: bytes, dtype: np.dtype) -> NDArray[Any]:
    """A read-only 1-D view of the bytes."""
    if len(data) % dtype.itemsize:
        raise WireError(f"{len(data)} bytes are no whole number of {dtype.name} values")
    return np.frombuffer(data, dtype=dtype)


def stored(array: NDArray[Any]) -> tuple[NDArray[Any], "pb.DType"]:
    """The array as it travels (float32 or int64, C order) and the name of its dtype."""
    if array.dtype.kind == "f":
        return np.ascontiguousarray(array, dtype="<f4"), pb.DTYPE_FLOAT32
    if array.dtype.kind in "iub":
        return np.ascontiguousarray(array, dtype="<i8"), pb.DTYPE_INT64
    raise WireError(f"an array of {array.dtype} cannot travel; use floats or integers")


def num_elements(shape: tuple[int, ...]) -> int:
    """Raises WireError on negative sizes, too many axes, and more than MAX_ELEMENTS."""
    if len(shape) > MAX_AXES:
        raise WireError(f"a tensor of {len(shape)} axes; at most {MAX_AXES} are allowed")
    if any(size < 0 or size > MAX_ELEMENTS for size in shape):
        raise WireError(f"a size in shape {list(shape)} is outside 0..{MAX_ELEMENTS}")
    total = math.prod(shape)
    if total > MAX_ELEMENTS:
        raise WireError(f"shape {list(shape)} exceeds {MAX_ELEMENTS} elements")
    return total


def reshaped(flat: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Raises WireError where the numbers do not fill the shape exactly."""
    if num_elements(shape) != flat.size:
        raise WireError(f"{flat.size} numbers do not fill shape {list(shape)}")
    return flat.reshape(shape)


def check_csr(
    values: NDArray[Any],
    crow_indices: NDArray[np.int64],
    col_indices: NDArray[np.int64],
    shape: tuple[int, ...],
) -> NDArray[np.int64]:
    """The number of values in each row. Raises WireError on inconsistent parts and on shapes
    above MAX_ELEMENTS; allocates nothing of the dense size."""
    if len(shape) != 2:
        raise WireError(f"a sparse tensor needs a shape of two sizes, got {list(shape)}")
    num_elements(shape)
    rows, columns = shape
    counts = _row_counts(crow_indices, rows, len(values))
    if len(col_indices) != len(values):
        raise WireError(f"{len(values)} sparse values but {len(col_indices)} col_indices")
    if bool(np.any((col_indices < 0) | (col_indices >= columns))):
        raise WireError(f"a sparse column index is outside 0..{columns - 1}")
    return counts


def densify_csr(
    values: NDArray[Any],
    crow_indices: NDArray[np.int64],
    col_indices: NDArray[np.int64],
    shape: tuple[int, ...],
) -> NDArray[Any]:
    """A dense array of `shape` (rows, columns) from CSR parts; unlisted entries are 0.

    Raises WireError as check_csr does.
    """
    counts = check_csr(values, crow_indices, col_indices, shape)
    dense = np.zeros(shape, dtype=values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), col_indices] = values
    return dense


def _row_counts(crow_indices: NDArray[np.int64], rows: int, num_values: int) -> NDArray[np.int64]:
    if len(crow_indices) != rows + 1 or crow_indices[0] != 0 or crow_indices[-1] != num_values:
        raise WireError(f"crow_indices must be {rows + 1} numbers from 0 to {num_values}")
    # In bounds first: differences of arbitrary int64 numbers may wrap around.
    if bool(np.any((crow_indices < 0) | (crow_indices > num_values))):
        raise WireError(f"crow_indices must lie in 0..{num_values}")
    counts = np.diff(crow_indices)
    if bool(np.any(counts < 0)):
        raise WireError("crow_indices must not decrease")
    return counts


def tensor_from_message(message: "pb.Tensor") -> NDArray[Any]:
    """Dense float32 or int64 of the message's shape; 1-D where it has none."""
    shape = tuple(message.shape)
    encoding = message.WhichOneof("encoding")
    if encoding == "sparse_csr":
        csr = message.sparse_csr
        return densify_csr(
            from_bytes(csr.values, message.dtype),
            plain_from_bytes(csr.crow_indices, np.dtype("<i8")),
            plain_from_bytes(csr.col_indices, np.dtype("<i8")),
            shape,
        )
    flat = from_bytes(message.dense, message.dtype)
    return reshaped(flat, shape) if shape else flat


def write_tensor(message: "pb.Tensor", array: NDArray[Any]) -> None:
    """Fill `message` with a dense tensor."""
    travelling, message.dtype = stored(array)
    message.dense = travelling.tobytes()
    message.shape.extend(array.shape)
