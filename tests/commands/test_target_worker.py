"""What a target worker says of the model that it verifies with."""

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.embedded.tiny import write_tiny_model
from tinkercloud.commands.target_worker import _base, _described
from tinkercloud.config import Config


def digest(path: Path, data_dir: Path) -> bytes:
    config = Config(data_dir=data_dir)
    return _described(config, _base(config, path), path).digest


def test_its_digest_is_that_of_the_weights_too(tmp_path: Path) -> None:
    """Of a model with the same name and config, and one number of one tensor changed."""
    first = write_tiny_model(tmp_path / "one" / "model")
    copy = Path(shutil.copytree(first, tmp_path / "two" / "model"))
    assert digest(first, tmp_path) == digest(copy, tmp_path)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    assert digest(first, tmp_path) != digest(copy, tmp_path)
