"""The salient inputs of a base model, kept between starts: to choose them reads all weights in
float64, which takes longer than everything else at the start of a bfloat16 engine."""

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinkercloud import flushing
from tinkercloud.architectures.config import ArchitectureConfig
from tinkercloud.config import user_cache_dir
from tinkercloud.embedded.model import packed_tensors, salience
from tinkercloud.embedded.model.packed_tensors import PackedTensors
from tinkercloud.embedded.native.compiler import flags_in_use, source

logger = logging.getLogger(__name__)

FEWEST_BYTES = 2**26
"""Of weights; smaller ones are read faster than a file is worth."""


def kept(
    weights: PackedTensors, config: ArchitectureConfig, choose: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """What `choose` returns, which is a function of the weights and of what computes it."""
    if weights.nbytes < FEWEST_BYTES:
        return choose()
    path = user_cache_dir() / f"salience-{_key(weights, config)}.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError):  # not there, or damaged
        chosen = choose()
    _write(chosen, path)
    return chosen


def _key(weights: PackedTensors, config: ArchitectureConfig) -> str:
    """Of all that the choice depends on: every weight, and the code."""
    code = Path(salience.__file__).read_text()
    versions = (np.__version__, torch.__version__, str(packed_tensors.NUM_SALIENT), code)
    digest = hashlib.sha256("\n".join((*versions, source(), *flags_in_use())).encode())
    digest.update(repr(config).encode())
    for name, tensor in sorted(weights.state().items()):
        digest.update(f"\n{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:24]


def _write(chosen: dict[str, Tensor], path: Path) -> None:
    """Modules that read the same inputs share a tensor, which a file holds for each."""
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: inputs.clone() for name, inputs in chosen.items()}, partial)
        flushing.flush(partial)
        partial.replace(path)  # atomic: other engines may write it too
    except OSError as error:
        logger.warning("the next start chooses salient inputs again: %s", error)
