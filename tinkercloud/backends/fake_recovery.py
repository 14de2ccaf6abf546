"""What the fake backend writes so that its models come back: as `fake_model` has it, with the
accumulated gradient in a file of its own."""

from dataclasses import replace
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from tinkercloud import flushing
from tinkercloud.backends.fake_model import (
    BaseWeights,
    ModelState,
    check_fits,
    read_state,
    write_state,
)
from tinkercloud.errors import StateDamaged, UserError

GRADIENT_FILE = "fake_gradient.npz"


def write_model(model: ModelState, directory: Path) -> int:
    """All of it, flushed to the disk; the size of its files in bytes."""
    write_state(model, directory, with_optimizer=True)
    gradient = {} if model.gradient is None else {"gradient": model.gradient}
    np.savez(directory / GRADIENT_FILE, allow_pickle=False, **gradient)
    flushing.flush_folder(directory)
    return sum(path.stat().st_size for path in directory.iterdir())


def read_model(base: BaseWeights, directory: Path) -> ModelState:
    """Raises StateDamaged unless the folder is as `write_model` left it, for a model of `base`."""
    try:
        model = read_state(directory)
        with (directory / GRADIENT_FILE).open("rb") as raw, np.load(raw) as file:
            gradient = file.get("gradient")
        check_fits(model, base)
    except (OSError, EOFError, ValueError, KeyError, BadZipFile, UserError) as error:
        raise StateDamaged(f"{type(error).__name__}: {error}") from None
    if model.base_model != base.served.name:
        raise StateDamaged(f"it is of a model of {model.base_model!r}, not of {base.served.name!r}")
    return replace(model, gradient=gradient)
