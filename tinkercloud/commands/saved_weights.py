"""Weights that commands take by `--weights`: an adapter's or a checkpoint's, over a base model."""

from pathlib import Path

from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.training.checkpoints import load_weights
from tinkercloud.embedded.training.trainable_model import frozen
from tinkercloud.errors import ConfigError, UserError
from tinkercloud.weights.adapter_folders import open_adapter
from tinkercloud.weights.adapters import Adapter
from tinkercloud.weights.checkpoints import STATE_FILE

TINKER, CHECKPOINTS = "tinker://", "checkpoints"


def weights_folder(data_dir: Path, weights: str) -> Path:
    """weights: a folder's path, or a checkpoint's tinker:// path, of which these are the newest
    files: a save that replaces others leaves only them. Raises UserError where there is no such
    checkpoint, ConfigError where there is no such folder."""
    if not weights.startswith(TINKER):
        folder = Path(weights)
        if not folder.is_dir():
            raise ConfigError(f"--weights {folder}: there is no such folder")
        return folder
    parent = data_dir / CHECKPOINTS / weights.removeprefix(TINKER)
    folders = [path for path in parent.glob("*") if (path / STATE_FILE).is_file()]
    if not folders:
        raise UserError(f"{data_dir} has no checkpoint {weights}")
    return max(folders, key=lambda path: path.stat().st_mtime)


def with_weights(base: BaseModel, folder: Path, source: Path) -> Version:
    """folder: of an adapter (PEFT's or MLX-LM's) or of a checkpoint. source: of the base model.
    Raises UserError."""
    name = f"{base.name} with {folder}"
    if not (folder / STATE_FILE).is_file():
        imported = open_adapter(folder, source)
        scale = imported.spec.alpha / imported.spec.rank
        return Version(name, base, base.weights, placed(imported.adapter, base), scale)
    spec, adapter, full, _ = load_weights(base, folder)
    if full is not None:
        return Version(name, base, frozen(base, full), None, 1.0)
    return Version(name, base, base.weights, adapter, spec.alpha / spec.rank)


def placed(adapter: Adapter, base: BaseModel) -> Adapter:
    return {name: (a.to(base.device), b.to(base.device)) for name, (a, b) in adapter.items()}
