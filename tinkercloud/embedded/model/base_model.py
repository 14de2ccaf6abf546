"""A base model in memory: configuration, frozen weights, tokenizer, device."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tinkercloud.architectures import load_architecture
from tinkercloud.architectures.config import ArchitectureConfig
from tinkercloud.architectures.llama import Llama
from tinkercloud.embedded.model import freed_memory, salience_file
from tinkercloud.embedded.model.packed_tensors import EMBEDDING, UNEMBEDDING, PackedTensors
from tinkercloud.embedded.model.salience import salient_inputs
from tinkercloud.embedded.native.train_bindings import has_compiled_pass, training_team
from tinkercloud.weights.loader import read_model


@dataclass(frozen=True, slots=True)
class BaseModel:
    """weights: tensors by Hugging Face module name; frozen, shared by all models and versions;
    `PackedTensors` where the compiled pass reads them."""

    name: str
    config: ArchitectureConfig
    architecture: Llama  # or one of its descendants
    weights: Mapping[str, Tensor]
    decoder: Tokenizer | None
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def load(
        cls, name: str, path: Path, tokenizer_path: Path | None, dtype: torch.dtype,
        device: torch.device,
    ) -> "BaseModel":  # fmt: skip
        """Raises ConfigError."""
        config, tensors = read_model(path, dtype)
        loaded = cls.of(name, config, tensors, dtype, device)
        freed_memory.give_back()  # of tensors in the file's number type and in `dtype`
        if tokenizer_path is None:
            return loaded
        decoder = Tokenizer.from_file(str(tokenizer_path / "tokenizer.json"))
        return replace(loaded, decoder=decoder)

    @classmethod
    def of(
        cls,
        name: str,
        config: ArchitectureConfig,
        tensors: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> "BaseModel":
        """Without a tokenizer. tensors: by name, in `dtype`, asked for one by one; without an
        "lm_head" among them the embedding is the unembedding too."""
        architecture = load_architecture(config.name)(config, device)
        if has_compiled_pass(device, dtype):
            packed = _with_salient(PackedTensors.of(tensors), architecture)
            return cls(name, config, architecture, packed, None, dtype, device)
        weights = {path: tensor.to(device) for path, tensor in tensors}
        weights.setdefault(UNEMBEDDING, weights[EMBEDDING])
        return cls(name, config, architecture, weights, None, dtype, device)

    @property
    def is_llama_family(self) -> bool:
        """Whether the passes that are written out compute this network: one decoder, whose switches
        are in its config."""
        return type(self.architecture) is Llama

    def tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _with_salient(weights: PackedTensors, architecture: Llama) -> PackedTensors:
    if weights.packed.dtype != torch.bfloat16:
        return weights

    def choose() -> dict[str, Tensor]:
        with training_team() as team:
            return salient_inputs(team, architecture, weights.packed)

    return weights.with_salient(salience_file.kept(weights, architecture.config, choose))
