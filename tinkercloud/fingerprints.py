"""Hashes of weights, as anybody can compute them: of files with tensors, by their names."""

import hashlib
from pathlib import Path

TENSOR_SUFFIXES = (".safetensors", ".npz", ".gguf")
OPTIMIZER = "optimizer"


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensors_sha256(place: Path, *, with_optimizer: bool = True) -> str:
    """Of a file, its own; of a folder, that of the lines `SHA256  NAME` of its files with tensors,
    sorted by name, as `sha256sum` prints them."""
    if place.is_file():
        return file_sha256(place)
    paths = sorted(
        path
        for path in place.iterdir()
        if path.suffix in TENSOR_SUFFIXES
        and (with_optimizer or not path.name.startswith(OPTIMIZER))
    )
    lines = "".join(f"{file_sha256(path)}  {path.name}\n" for path in paths)
    return hashlib.sha256(lines.encode()).hexdigest()
