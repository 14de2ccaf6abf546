"""A checkpoint folder as other programs read it: PEFT's two files, or a Hugging Face folder.

Everything is pieces of files that are there, and a few new bytes, so that an archive is sent
without being written first. Neither torch nor safetensors: the API process loads no tensor.

The safetensors format: 8 bytes, the header's length, little-endian; the header, JSON; then the
tensors' bytes, at offsets that count from the header's end
(https://github.com/huggingface/safetensors#format).
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkercloud.core.types import ServedModel
from tinkercloud.errors import ServerFault
from tinkercloud.services.checkpoints.checkpoint_files import MANIFEST

PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")
FULL_FILE = "model.safetensors"
TOKENIZER_FILES = (
    "chat_template.jinja",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
)
_INTERNAL = (MANIFEST, "training_state.json", "optimizer.safetensors")
_ALIGNMENT = 8  # of where tensors begin
_MAX_HEADER_BYTES = 100 * 1024 * 1024  # the format's own limit
_CHUNK_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class FileSlice:
    """num_bytes of a file, from an offset on."""

    path: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Parts:
    """The content of a file: bytes and slices, one after the other."""

    parts: tuple[bytes | FileSlice, ...]

    @property
    def num_bytes(self) -> int:
        return sum(len(p) if isinstance(p, bytes) else p.num_bytes for p in self.parts)

    def read(self) -> Iterator[bytes]:
        """In chunks. Raises ServerFault for a file that ends too early."""
        for part in self.parts:
            if isinstance(part, bytes):
                yield part
            else:
                yield from _read(part)


def _read(part: FileSlice) -> Iterator[bytes]:
    with part.path.open("rb") as file:
        file.seek(part.offset)
        left = part.num_bytes
        while left:
            chunk = file.read(min(left, _CHUNK_BYTES))
            if not chunk:
                raise ServerFault(f"{part.path.name} of this checkpoint ends too early")
            yield chunk
            left -= len(chunk)


def whole(path: Path) -> Parts:
    return Parts((FileSlice(path, 0, path.stat().st_size),))


def exported_files(directory: Path, served: ServedModel | None) -> dict[str, Parts]:
    """File name -> content. served: the base model, for full weights; without it (it is no longer
    served) they come without config and tokenizer.

    Of a checkpoint of the backend `fake`, and of an export, all files as they are.
    """
    if (directory / PEFT_FILES[1]).is_file():
        return {name: whole(directory / name) for name in PEFT_FILES}
    if (directory / FULL_FILE).is_file() and not (directory / "config.json").is_file():
        return _hugging_face(directory / FULL_FILE, served)
    return {
        path.name: whole(path)
        for path in sorted(directory.iterdir())
        if path.is_file() and path.name not in _INTERNAL
    }


def _hugging_face(path: Path, served: ServedModel | None) -> dict[str, Parts]:
    files = {FULL_FILE: _with_hugging_face_names(path)}
    if served is None:
        return files
    if served.hf_config is not None:
        # Checkpoints are float32 whatever the base is served in.
        config = {**served.hf_config, "dtype": "float32", "torch_dtype": "float32"}
        files["config.json"] = Parts((json.dumps(config, indent=2).encode(),))
    folder = served.tokenizer_path
    for name in TOKENIZER_FILES if folder is not None else ():
        if folder is not None and (folder / name).is_file():
            files[name] = whole(folder / name)
    return files


def _with_hugging_face_names(path: Path) -> Parts:
    """Checkpoints name modules, Hugging Face parameters: NAME is NAME.weight there, biases keep
    their names."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise ServerFault(f"{path.name} of this checkpoint is no safetensors file")
        header: Mapping[str, Any] = json.loads(file.read(length))
    renamed = {_parameter_name(name): entry for name, entry in header.items()}
    text = json.dumps(renamed, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    begin = 8 + length
    tensors = FileSlice(path, begin, path.stat().st_size - begin)
    return Parts((len(text).to_bytes(8, "little") + text, tensors))


def _parameter_name(name: str) -> str:
    if name == "__metadata__" or name.endswith((".weight", "bias")):
        return name
    return f"{name}.weight"


def write_export(source: Path, target: Path, served: ServedModel | None) -> None:
    """The files that other programs read, of the checkpoint in `source`; that one is used up."""
    for name, content in exported_files(source, served).items():
        if (source / name).is_file() and content == whole(source / name):
            (source / name).rename(target / name)
            continue
        with (target / name).open("wb") as file:
            for chunk in content.read():
                file.write(chunk)
    shutil.rmtree(source)
