"""A model's checkpoint folder, written and read (the format: `weights.checkpoints`)."""

from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from tinkercloud.core.types import LoraSpec
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.training.trainable_model import TrainableModel
from tinkercloud.errors import UserError
from tinkercloud.weights.adapters import Adapter, load_adapter, save_adapter
from tinkercloud.weights.checkpoints import (
    FULL_FILE,
    OPTIMIZER_FILE,
    TrainingState,
    read_state,
    read_tensors,
    require_optimizer,
    write_state,
    write_tensors,
)


def save(model: TrainableModel, directory: Path, *, with_optimizer: bool) -> None:
    """Write the model's files into an existing folder."""
    if model.adapter is not None:
        save_adapter(model.adapter, model.spec, model.base.name, directory)
    else:
        write_tensors(model.params, directory / FULL_FILE)
    if with_optimizer:
        write_tensors(model.optimizer.state(), directory / OPTIMIZER_FILE)
    state = TrainingState(model.base.name, model.spec, model.optimizer.num_steps, with_optimizer)
    write_state(state, directory)


def load(
    model_id: str, base: BaseModel, directory: Path, *, with_optimizer: bool
) -> TrainableModel:
    """Raises UserError when the folder does not hold a checkpoint that fits `base`."""
    spec, adapter, full, state = load_weights(base, directory)
    model = TrainableModel(model_id, base, spec, adapter, full)
    if with_optimizer:
        require_optimizer(state)
        model.optimizer.load_state(read_tensors(directory / OPTIMIZER_FILE), state.num_steps)
    return model


def load_weights(
    base: BaseModel, directory: Path
) -> tuple[LoraSpec, Adapter | None, dict[str, Tensor] | None, TrainingState]:
    """(spec, adapter or None, full weights or None, training state)."""
    state = read_state(directory)
    spec = state.lora
    if spec.rank > 0:
        try:
            adapter = load_adapter(directory, spec, base.config.linear_shapes(), base.device)
        except (SafetensorError, OSError) as error:
            raise UserError(f"the checkpoint cannot be read: {error}") from None
        return spec, adapter, None, state
    full = read_tensors(directory / FULL_FILE)
    if {n: tuple(t.shape) for n, t in full.items()} != base.config.weight_shapes():
        raise UserError(f"the checkpoint's weights are not those of a {base.name}")
    return spec, None, {n: t.float().to(base.device) for n, t in full.items()}, state
