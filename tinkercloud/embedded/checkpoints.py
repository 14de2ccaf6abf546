"""A model's files: adapter (PEFT) or full weights, optimizer state, and how it was made."""

import dataclasses
import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinkercloud.core.types import LoraSpec
from tinkercloud.embedded.base_model import BaseModel
from tinkercloud.embedded.lora import Adapter, load_adapter, save_adapter
from tinkercloud.embedded.trainer import TrainableModel, full_parameters
from tinkercloud.errors import UserError

STATE_FILE = "training_state.json"
FULL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"


def save(model: TrainableModel, directory: Path, *, with_optimizer: bool) -> None:
    """Write the model's files into an existing folder."""
    if model.adapter is not None:
        save_adapter(model.adapter, model.spec, model.base.name, directory)
    else:
        _save(model.params, directory / FULL_FILE)
    if with_optimizer:
        _save(model.optimizer.state(), directory / OPTIMIZER_FILE)
    state = {
        "format": 1,
        "base_model": model.base.name,
        "lora": dataclasses.asdict(model.spec),
        "num_steps": model.optimizer.num_steps,
        "has_optimizer": with_optimizer,
    }
    (directory / STATE_FILE).write_text(json.dumps(state, indent=2))


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    flat = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    save_file(flat, path, metadata={"format": "pt"})


def load(
    model_id: str, base: BaseModel, directory: Path, *, with_optimizer: bool
) -> TrainableModel:
    """Raises UserError when the folder does not hold a checkpoint that fits `base`."""
    spec, adapter, full, state = load_weights(base, directory)
    model = TrainableModel(model_id, base, spec, adapter, full)
    if with_optimizer:
        if not state["has_optimizer"]:
            raise UserError(
                "this checkpoint has no optimizer state (save_weights_for_sampler does not keep "
                "it); load it without the optimizer"
            )
        model.optimizer.load_state(_read(directory / OPTIMIZER_FILE), int(state["num_steps"]))
    return model


def load_weights(
    base: BaseModel, directory: Path
) -> tuple[LoraSpec, Adapter | None, dict[str, Tensor] | None, dict]:
    """(spec, adapter or None, full weights or None, training state)."""
    try:
        state = json.loads((directory / STATE_FILE).read_text())
        spec = LoraSpec(**state["lora"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"not a checkpoint of this server: {error}") from None
    try:
        if spec.rank > 0:
            return spec, load_adapter(directory, spec, base.config.linear_shapes(), base.device), \
                None, state  # fmt: skip
        full = _read(directory / FULL_FILE)
    except (SafetensorError, OSError) as error:
        raise UserError(f"the checkpoint cannot be read: {error}") from None
    expected = {name: t.shape for name, t in full_parameters(base).items()}
    if {n: t.shape for n, t in full.items()} != expected:
        raise UserError(f"the checkpoint's weights are not those of a {base.name}")
    return spec, None, {n: t.float().to(base.device) for n, t in full.items()}, state


def _read(path: Path) -> dict[str, Tensor]:
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"the checkpoint's tensor {name} is not finite")
    return tensors
