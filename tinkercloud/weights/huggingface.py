"""A Hugging Face folder for every base model: engines that read nothing else need one."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tinkercloud.architectures.config import ArchitectureConfig
from tinkercloud.weights.gguf_file import GGUFFile
from tinkercloud.weights.gguf_loader import gguf_config, gguf_weights
from tinkercloud.weights.loader import is_gguf
from tinkercloud.weights.tokenizer import ensure_tokenizer_folder

_FORMAT = 1  # of the folders written here; a change makes all cached ones stale
_FILE_BYTES = 2 * 1024**3
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def ensure_hf_folder(path: Path, cache_dir: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A folder with config.json, safetensors and tokenizer (where the file has one) that
    transformers loads, offline.

    path: a Hugging Face folder (returned as it is) or a GGUF file, which is unpacked below
    `cache_dir` once per file and dtype. Raises ConfigError for a file that cannot be read.
    """
    if not is_gguf(path):
        return path
    folder = cache_dir / _cache_name(path, dtype)
    if folder.is_dir():
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed: a folder under its final name is always whole.
    aside = Path(tempfile.mkdtemp(prefix=".writing-", dir=cache_dir))
    try:
        _write_folder(path, aside, cache_dir, dtype)
        aside.chmod(0o755)
        os.rename(aside, folder)
    except OSError:
        if not folder.is_dir():  # else another process was first, with the same content
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _cache_name(path: Path, dtype: torch.dtype) -> str:
    stat = path.stat()
    key = f"{_FORMAT}:{path.name}:{stat.st_size}:{stat.st_mtime_ns}:{dtype}"
    return f"{path.stem}-hf-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _write_folder(path: Path, folder: Path, cache_dir: Path, dtype: torch.dtype) -> None:
    file = GGUFFile(path)
    config = gguf_config(file)
    places: dict[str, str] = {}
    total = 0
    for number, part in enumerate(_parts(gguf_weights(file, config, dtype))):
        name = f"model-{number:05d}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(part, name)
        total += sum(t.numel() * t.element_size() for t in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "config.json", hf_config(config, dtype))
    if "tokenizer.ggml.tokens" in file.metadata:
        tokenizer = ensure_tokenizer_folder(path, cache_dir)
        assert tokenizer is not None, "a GGUF file gets a tokenizer folder"
        for name in _TOKENIZER_FILES:
            shutil.copy(tokenizer / name, folder / name)


def _parts(weights: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        full = name if name.endswith(".bias") else f"{name}.weight"
        part[full] = tensor.contiguous()
        size += tensor.numel() * tensor.element_size()
        if size >= _FILE_BYTES:
            yield part
            part, size = {}, 0
    if part:
        yield part


def hf_config_of(path: Path, config: ArchitectureConfig) -> Mapping[str, Any]:
    """The config.json of a base model: of a folder its own, of a GGUF file what says the same."""
    if is_gguf(path):
        return hf_config(config, torch.float32)
    return json.loads((path / "config.json").read_text(encoding="utf-8"))


def hf_config(config: ArchitectureConfig, dtype: torch.dtype) -> dict[str, Any]:
    """A config.json that `architectures.config.from_hf` and transformers (4 and 5) read alike."""
    raw = asdict(config)
    scaling: Mapping[str, Any] | None = raw["rope_scaling"]
    eos = list(config.eos_token_ids)
    return {
        "architectures": [config.name],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
