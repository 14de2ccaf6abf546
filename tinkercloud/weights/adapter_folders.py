"""Folders with an adapter, PEFT's or MLX-LM's."""

from pathlib import Path

from tinkercloud.weights.mlx_adapters import MLX_FILE, read_mlx_adapter
from tinkercloud.weights.peft_import import ImportedAdapter, import_adapter


def open_adapter(directory: Path, base: Path) -> ImportedAdapter:
    """For the base model at `base`. Raises UserError where it cannot be had exactly."""
    if (directory / MLX_FILE).is_file():
        return read_mlx_adapter(directory, base)
    return import_adapter(directory, base)
