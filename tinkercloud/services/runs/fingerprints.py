"""Hashes of weights, as anybody can compute them: of files with tensors, by their names."""

import hashlib
from pathlib import Path

TENSOR_SUFFIXES = (".safetensors", ".npz", ".gguf")
OPTIMIZER = "optimizer"
CHUNK_BYTES = 2**20


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


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
