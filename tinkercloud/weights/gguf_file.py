"""Reading a GGUF file: metadata, tensor table, dequantised rows.

The container is parsed here and not by `gguf.GGUFReader`, which takes seconds for a large
vocabulary and trusts the lengths that a damaged file states. Format: the GGUF specification of
ggml, versions 2 and 3, little-endian. Dequantisation: `gguf.quants`.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from tinkercloud.errors import ConfigError

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_FORMATS = {code: struct.Struct("<" + letter) for code, letter in _SCALARS.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """shape as Hugging Face orders it (out, in); offset and num_bytes in the file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


class GGUFFile:
    """One open file, mapped into memory. Raises ConfigError for a file that is damaged or cut."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            cursor = _Cursor(self._map)
            self.metadata, self.tensors = _read_header(cursor)
        except (OSError, ValueError, KeyError, struct.error) as error:
            raise ConfigError(f"{path.name} is not a whole GGUF file: {error}") from error

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows [start, stop) of the tensor, dequantised; a vector counts as one row. Raises
        ConfigError."""
        entry = self.tensors[name]
        num_rows = prod(entry.shape[:-1])
        data = np.frombuffer(self._map, np.uint8, entry.num_bytes, entry.offset)
        data = data.reshape(num_rows, -1)[start:stop]
        try:
            with np.errstate(invalid="ignore"):  # a scale of infinity times 0: named below
                values = dequantize(data, entry.kind)
        except NotImplementedError as error:
            raise ConfigError(f"{self.path.name}: tensor {name}: {error}") from error
        if not np.isfinite(values).all():
            raise ConfigError(
                f"{self.path.name}: tensor {name} has numbers that are not finite: the file is "
                "damaged; fetch or convert it again"
            )
        return values.reshape(data.shape[0], entry.shape[-1])


class _Cursor:
    """Walks the mapped bytes; struct.error or ValueError at the end, never a read past it."""

    def __init__(self, data: mmap.mmap):
        self._data = data
        self.offset = 0
        self.size = len(data)

    def take(self, count: int) -> bytes:
        if count > self.size - self.offset:
            raise ValueError(f"it ends at byte {self.size}, in the middle of its header")
        self.offset += count
        return self._data[self.offset - count : self.offset]

    def scalar(self, code: int) -> Any:
        form = _FORMATS[code]
        return form.unpack(self.take(form.size))[0]

    def string(self) -> str:
        return self.take(self.scalar(10)).decode("utf-8", errors="replace")

    def value(self, code: int, depth: int = 0) -> Any:
        if code == _STRING:
            return self.string()
        if code != _ARRAY:
            return self.scalar(code)
        if depth > 2:
            raise ValueError("its metadata nests arrays too deeply")
        inner, count = self.scalar(4), self.scalar(10)
        if inner in _FORMATS:
            return list(self._scalars(inner, count))
        return [self.value(inner, depth + 1) for _ in range(self._plausible(count))]

    def _scalars(self, code: int, count: int) -> tuple[Any, ...]:
        data = self.take(count * _FORMATS[code].size)
        return struct.unpack(f"<{count}{_SCALARS[code]}", data)

    def _plausible(self, count: int) -> int:
        """Every item takes eight bytes or more, which bounds what a damaged count can ask for."""
        if count > (self.size - self.offset) // 8:
            raise ValueError(f"a list of {count} items does not fit into the file")
        return count


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    if cursor.take(4) != _MAGIC:
        raise ValueError("it does not begin with the letters GGUF")
    if (version := cursor.scalar(4)) not in (2, 3):
        raise ValueError(f"version {version} is not supported (2 and 3 are)")
    num_tensors, num_values = cursor.scalar(10), cursor.scalar(10)
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar(4))
    table = [_read_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"its alignment is {alignment!r}")
    base = -(-cursor.offset // alignment) * alignment
    tensors = {name: _placed(name, entry, base, cursor.size) for name, entry in table}
    if len(tensors) != num_tensors:
        raise ValueError("it names a tensor twice")
    return metadata, tensors


def _read_tensor(cursor: _Cursor) -> tuple[str, TensorEntry]:
    name = cursor.string()
    num_axes = cursor.scalar(4)
    if not 1 <= num_axes <= 4:
        raise ValueError(f"tensor {name} has {num_axes} axes")
    shape = tuple(reversed([cursor.scalar(10) for _ in range(num_axes)]))
    kind = GGMLQuantizationType(cursor.scalar(4))
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if 0 in shape or shape[-1] % block:
        raise ValueError(f"tensor {name} of shape {shape} cannot be {kind.name}")
    num_bytes = prod(shape) // block * block_bytes
    return name, TensorEntry(shape, kind, cursor.scalar(10), num_bytes)


def _placed(name: str, entry: TensorEntry, base: int, size: int) -> TensorEntry:
    offset = base + entry.offset
    if offset + entry.num_bytes > size:
        raise ValueError(f"it ends at byte {size}, before the end of tensor {name}")
    return TensorEntry(entry.shape, entry.kind, offset, entry.num_bytes)
