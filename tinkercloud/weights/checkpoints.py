"""A checkpoint folder: adapter (PEFT) or full weights, optimizer state, and how it was made.

One format for every backend and every parallel layout: tensors go by Hugging Face module names
(as in `weights.loader`), whole and float32, so that a checkpoint of one plan loads under another.

    training_state.json        format, base_model, lora (a LoraSpec), num_steps, has_optimizer
    adapter_model.safetensors, adapter_config.json        rank > 0, PEFT's files
    model.safetensors          rank 0: every trainable tensor
    optimizer.safetensors      `exp_avg.NAME` and `exp_avg_sq.NAME`; NAME of an adapter's tensor is
                               MODULE.lora_A or MODULE.lora_B
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinkercloud.core.types import LoraSpec
from tinkercloud.errors import UserError

STATE_FILE = "training_state.json"
FULL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What training_state.json says."""

    base_model: str
    lora: LoraSpec
    num_steps: int
    has_optimizer: bool


def write_state(state: TrainingState, directory: Path) -> None:
    text = json.dumps({"format": 1, **dataclasses.asdict(state)}, indent=2)
    (directory / STATE_FILE).write_text(text)


def read_state(directory: Path) -> TrainingState:
    """Raises UserError when the folder holds no checkpoint."""
    try:
        raw = json.loads((directory / STATE_FILE).read_text())
        return TrainingState(
            raw["base_model"],
            LoraSpec(**raw["lora"]),
            int(raw["num_steps"]),
            bool(raw["has_optimizer"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"not a checkpoint of this server: {error}") from None


def require_optimizer(state: TrainingState) -> None:
    if not state.has_optimizer:
        raise UserError(
            "this checkpoint has no optimizer state (save_weights_for_sampler does not keep "
            "it); load it without the optimizer"
        )


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    flat = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    save_file(flat, path, metadata={"format": "pt"})


def read_tensors(path: Path, *, finite: bool = True) -> dict[str, Tensor]:
    """Raises UserError for a file that is damaged or, unless told otherwise, holds what is not
    finite."""
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"the checkpoint cannot be read: {error}") from None
    for name, tensor in tensors.items():
        if finite and not torch.isfinite(tensor).all():
            raise UserError(f"the checkpoint's tensor {name} is not finite")
    return tensors
