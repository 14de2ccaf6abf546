"""All that training has made of a model, copied in memory, and as files from which it goes on as if
nothing had happened.

The files are a checkpoint with the optimizer's state (`weights.checkpoints`), and besides

    gradient.safetensors    the accumulated gradient by names of parameters; a missing one is zero
    recovery.json           format; gradient: its names in their order, in which a norm is summed;
                            files: name -> size_bytes and crc32 of each of the others
"""

import dataclasses
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tinkercloud import flushing
from tinkercloud.core.types import LoraSpec
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.training import checkpoints
from tinkercloud.embedded.training.checkpoints import Contents
from tinkercloud.embedded.training.parts import Between, in_parts
from tinkercloud.embedded.training.trainable_model import TrainableModel
from tinkercloud.errors import StateDamaged, UserError
from tinkercloud.weights.checkpoints import read_state, read_tensors, write_tensors

GRADIENT_FILE = "gradient.safetensors"
RECOVERY_FILE = "recovery.json"
CHUNK_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A model between two of its operations, which later ones do not change."""

    contents: Contents
    gradient: dict[str, Tensor]

    @classmethod
    def sharing(cls, model: TrainableModel) -> "StateCopy":
        """The model's own tensors: this is a copy until its next operation."""
        return cls(Contents.of(model, with_optimizer=True), dict(model.grads))

    @classmethod
    def of(cls, model: TrainableModel) -> "StateCopy":
        """In the host's memory."""
        contents = Contents.of(model, with_optimizer=True)
        params = _copied(model.params, model.between)
        adapter = (
            None
            if contents.adapter is None
            else {n: (params[f"{n}.lora_A"], params[f"{n}.lora_B"]) for n in contents.adapter}
        )
        full = None if contents.full is None else params
        moments = _copied(contents.moments or {}, model.between)
        held = dataclasses.replace(contents, adapter=adapter, full=full, moments=moments)
        return cls(held, _copied(model.grads, model.between))


def write(copy: StateCopy, directory: Path) -> int:
    """Into an existing, empty folder, and onto the disk; the size of its files in bytes."""
    checkpoints.write(copy.contents, directory)
    if copy.gradient:
        write_tensors(copy.gradient, directory / GRADIENT_FILE)
    files = {path.name: _fingerprint(path) for path in sorted(directory.iterdir())}
    about = {"format": 1, "gradient": list(copy.gradient), "files": files}
    (directory / RECOVERY_FILE).write_text(json.dumps(about, indent=1))
    flushing.flush_folder(directory)
    return sum(path.stat().st_size for path in directory.iterdir())


def spec_of(directory: Path) -> LoraSpec:
    """Of the model that the folder is the state of. Raises StateDamaged."""
    try:
        return read_state(directory).lora
    except UserError as error:
        raise StateDamaged(str(error)) from None


def restore(model_id: str, base: BaseModel, directory: Path) -> TrainableModel:
    """Raises StateDamaged unless the folder is as `write` left it, and of a model of `base`."""
    names = _verified(directory)
    try:
        made_of = read_state(directory).base_model
        if made_of != base.name:
            raise StateDamaged(f"it is of a model of {made_of!r}, not of {base.name!r}")
        # What training has made may be not finite; the operations after it say so, as they did.
        model = checkpoints.load(model_id, base, directory, with_optimizer=True, finite=False)
        gradient = read_tensors(directory / GRADIENT_FILE, finite=False) if names else {}
    except UserError as error:
        raise StateDamaged(str(error)) from None
    shapes = {name: param.shape for name, param in model.params.items()}
    if any(name not in gradient or gradient[name].shape != shapes.get(name) for name in names):
        raise StateDamaged("its gradient is not that of its weights")
    model.grads = {name: gradient[name].clone().to(base.device) for name in names}
    return model


def _copied(tensors: Mapping[str, Tensor], between: Between) -> dict[str, Tensor]:
    parts = in_parts(tensors.items(), between)
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in parts}


def _verified(directory: Path) -> list[str]:
    """The names in the gradient. Raises StateDamaged."""
    try:
        about = json.loads((directory / RECOVERY_FILE).read_text())
        for name, expected in about["files"].items():
            if _fingerprint(directory / name) != expected:
                raise StateDamaged(f"its file {name!r} is not as it was written")
        return [str(name) for name in about["gradient"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateDamaged(f"{type(error).__name__}: {error}") from None


def _fingerprint(path: Path) -> dict[str, int]:
    """Against damage, not against malice: a server reads what it wrote."""
    checksum = size = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            checksum, size = zlib.crc32(chunk, checksum), size + len(chunk)
    return {"size_bytes": size, "crc32": checksum}
