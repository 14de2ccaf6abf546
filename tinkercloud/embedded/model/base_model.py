"""A base model in memory: configuration, frozen weights, tokenizer, device."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tinkercloud.architectures import load_architecture
from tinkercloud.architectures.config import ArchitectureConfig
from tinkercloud.architectures.llama import Llama
from tinkercloud.architectures.qwen2 import Qwen2
from tinkercloud.architectures.qwen3 import Qwen3
from tinkercloud.embedded.model.huge_pages import in_huge_pages
from tinkercloud.embedded.native.packed import PackedWeights, pack_weights
from tinkercloud.embedded.native.team import Team
from tinkercloud.weights.loader import load_model


@dataclass(frozen=True, slots=True)
class BaseModel:
    """weights: tensors by Hugging Face module name; frozen, shared by all models and versions."""

    name: str
    config: ArchitectureConfig
    architecture: Llama  # or one of its descendants
    weights: dict[str, Tensor]
    decoder: Tokenizer | None
    dtype: torch.dtype
    device: torch.device
    # not of `init`: a copy with other weights is packed anew
    _packed: list[PackedWeights] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @classmethod
    def load(
        cls, name: str, path: Path, tokenizer_path: Path | None, dtype: torch.dtype,
        device: torch.device,
    ) -> "BaseModel":  # fmt: skip
        loaded = load_model(path, dtype, device)
        architecture = load_architecture(loaded.config.name)(loaded.config, device)
        decoder = None
        if tokenizer_path is not None:
            decoder = Tokenizer.from_file(str(tokenizer_path / "tokenizer.json"))
        return cls(name, loaded.config, architecture, loaded.weights, decoder, dtype, device)

    @property
    def is_llama_family(self) -> bool:
        """Whether the passes that are written out compute this network: one block, with or without
        biases and norms of heads."""
        return type(self.architecture) in (Llama, Qwen2, Qwen3)

    def packed(self, team: Team) -> PackedWeights:
        """For the compiled pass, made at the first call and shared by sampling and training."""
        if not self._packed:
            self._packed.append(pack_weights(team, self.weights).moved(in_huge_pages))
        return self._packed[0]

    def tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)
