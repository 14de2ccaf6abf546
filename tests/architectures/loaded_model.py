"""A model's files, read at once into plain tensors."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tinkercloud.architectures.config import ArchitectureConfig
from tinkercloud.weights.loader import read_model


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """weights["lm_head"] is the same tensor object as weights["model.embed_tokens"] when tied."""

    config: ArchitectureConfig
    weights: dict[str, Tensor]


def load_model(path: Path, dtype: torch.dtype, device: torch.device | str) -> LoadedModel:
    config, tensors = read_model(path, dtype)
    weights = {name: tensor.to(device) for name, tensor in tensors}
    if config.tie_word_embeddings:
        weights["lm_head"] = weights["model.embed_tokens"]
    return LoadedModel(config, weights)
