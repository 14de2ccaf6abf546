"""Draft heads as files: the folder of a model's drafts, and reading a head back."""

import re
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.packed_tensors import PackedTensors
from tinkercloud.errors import ConfigError, NotFound
from tinkercloud.speculative.head.head import FrozenRows, Head, HeadConfig, initial_params
from tinkercloud.speculative.head.vocabulary import DraftVocabulary
from tinkercloud.speculative.learning.draft_folder import DraftFolder
from tinkercloud.weights.checkpoints import read_tensors

HEAD_FILE = "head.safetensors"
UNTRAINED = "as it was before any training"  # the reason in such a version's notes
VOCABULARY = 8192  # tokens that a head can draft


def drafts_of(drafts_dir: Path, model: str) -> DraftFolder:
    """The folder of one base model's drafts; made where it is not there."""
    return DraftFolder(drafts_dir / re.sub(r"[^A-Za-z0-9._-]+", "--", model))


def model_drafts_of(drafts_dir: Path, model: str, draft: Path) -> DraftFolder:
    """The folder of what the draft model at that path has learned for one base model."""
    return drafts_of(drafts_dir, f"{model}--draft {draft}")


def open_head(folder: DraftFolder, name: str, base: BaseModel) -> tuple[Head, dict[str, Tensor]]:
    """A version, or the one that an alias names. Raises ConfigError where there is none, or where
    it is not a head of this model."""
    try:
        path = folder.path(name)
    except NotFound as error:
        raise ConfigError(
            f"{base.name} has no draft head yet ({error}); `tinkercloud draft train` makes one"
        ) from None
    tensors = read_tensors(path / HEAD_FILE)
    params = {n: t.float() for n, t in tensors.items() if n not in ("vocabulary", "layers")}
    layers = tuple(int(layer) for layer in tensors.get("layers", torch.zeros(0)))
    try:
        config = HeadConfig(base.config, layers, params["gate_proj"].shape[0])
        fits = {name: tuple(t.shape) for name, t in params.items()} == config.shapes()
        ids = tensors["vocabulary"].tolist()
        vocabulary = DraftVocabulary.of(ids, base.config.vocab_size)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{path} holds no draft head of {base.name}: {error}") from None
    if not fits:
        raise ConfigError(f"the draft head in {path} is not one of {base.name}: other sizes")
    return Head(config, frozen_rows(base, vocabulary)), params


def untrained_head(base: BaseModel) -> tuple[Head, dict[str, Tensor]]:
    """For a start without any text: it can draft the lowest ids, which are the shortest and most
    frequent merges of a tokenizer, and what ends a text."""
    size = base.config.vocab_size
    counts = torch.zeros(size, dtype=torch.int64)
    ends = base.config.eos_token_ids
    vocabulary = DraftVocabulary.most_frequent(counts, min(VOCABULARY, size), ends)
    config = HeadConfig.of(base.config)
    return Head(config, frozen_rows(base, vocabulary)), initial_params(config, 0)


def has_trained(folder: DraftFolder) -> bool:
    """Whether the best draft has learned something."""
    return folder.find("best") is not None and folder.notes("best").get("reason") != UNTRAINED


def frozen_rows(base: BaseModel, vocabulary: DraftVocabulary) -> FrozenRows:
    """What a head of this base shares with it."""
    weights = base.weights
    packed = isinstance(weights, PackedTensors)
    embed = partial(weights.rows, "model.embed_tokens") if packed else None
    return FrozenRows.of(weights, vocabulary, embed)
