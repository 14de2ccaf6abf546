"""A safetensors file that is written tensor by tensor, with one of them in memory at a time."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

Shape = tuple[int, ...]


class TensorFile:
    """float32 tensors whose names and shapes are known before the first is written.

    They may be written in any order; `close` asserts that all were.
    """

    def __init__(self, path: Path, shapes: Mapping[str, Shape]):
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._offsets: dict[str, int] = {}
        self._shapes = dict(shapes)
        end = 0
        for name, shape in shapes.items():
            size = 4 * int(torch.Size(shape).numel())
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
            self._offsets[name] = end
            end += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._start + end)

    def write(self, name: str, tensor: Tensor) -> None:
        assert tuple(tensor.shape) == tuple(self._shapes.pop(name)), name
        self._file.seek(self._start + self._offsets[name])
        self._file.write(tensor.detach().float().cpu().contiguous().numpy().tobytes())

    def close(self) -> None:
        self._file.close()
        assert not self._shapes, f"never written: {sorted(self._shapes)[:3]}"
