"""A model's checkpoint folder, written and read (the format: `weights.checkpoints`)."""

from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, slots=True)
class Contents:
    """Of a checkpoint. Exactly one of adapter and full is not None; moments: as of `AdamW.state`,
    None for a checkpoint without the optimizer."""

    base_model: str
    spec: LoraSpec
    adapter: Adapter | None
    full: dict[str, Tensor] | None
    num_steps: int = 0
    moments: dict[str, Tensor] | None = None

    @classmethod
    def of(cls, model: TrainableModel, *, with_optimizer: bool) -> "Contents":
        """The model's own tensors."""
        optimizer = model.optimizer
        moments = optimizer.state() if with_optimizer else None
        steps = optimizer.num_steps
        return cls(model.base.name, model.spec, model.adapter, model.full, steps, moments)


def save(model: TrainableModel, directory: Path, *, with_optimizer: bool) -> None:
    """Write the model's files into an existing folder."""
    write(Contents.of(model, with_optimizer=with_optimizer), directory)


def write(contents: Contents, directory: Path) -> None:
    """Into an existing folder."""
    if contents.adapter is not None:
        save_adapter(contents.adapter, contents.spec, contents.base_model, directory)
    else:
        write_tensors(contents.full or {}, directory / FULL_FILE)
    if contents.moments is not None:
        write_tensors(contents.moments, directory / OPTIMIZER_FILE)
    has_optimizer = contents.moments is not None
    state = TrainingState(contents.base_model, contents.spec, contents.num_steps, has_optimizer)
    write_state(state, directory)


def load(
    model_id: str, base: BaseModel, directory: Path, *, with_optimizer: bool, finite: bool = True
) -> TrainableModel:
    """Its tensors have memory of their own: those of a file are as it puts them, and are read when
    they are first used. finite: refuse numbers that are not.

    Raises UserError when the folder does not hold a checkpoint that fits `base`."""
    spec, adapter, full, state = load_weights(base, directory, finite=finite)
    adapter = (
        None if adapter is None else {n: (a.clone(), b.clone()) for n, (a, b) in adapter.items()}
    )
    full = None if full is None else {n: t.clone() for n, t in full.items()}
    model = TrainableModel(model_id, base, spec, adapter, full)
    if with_optimizer:
        require_optimizer(state)
        moments = read_tensors(directory / OPTIMIZER_FILE, finite=finite)
        model.optimizer.load_state(moments, state.num_steps)
    return model


def load_weights(
    base: BaseModel, directory: Path, *, finite: bool = True
) -> tuple[LoraSpec, Adapter | None, dict[str, Tensor] | None, TrainingState]:
    """(spec, adapter or None, full weights or None, training state)."""
    state = read_state(directory)
    spec = state.lora
    if spec.rank > 0:
        adapter = load_adapter(directory, spec, base.config.linear_shapes(), base.device)
        return spec, adapter, None, state
    full = read_tensors(directory / FULL_FILE, finite=finite)
    if {n: tuple(t.shape) for n, t in full.items()} != base.config.weight_shapes():
        raise UserError(f"the checkpoint's weights are not those of a {base.name}")
    # In the base's order, as those of a fresh model: a gradient's norm is summed in it.
    names = [name for name in base.weights if name in full]
    return spec, None, {n: full[n].float().to(base.device) for n in names}, state
