"""What a target worker verifies with, and what it says of that."""

import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.embedded.tiny import write_tiny_model
from tinkercloud.commands.target_worker import _base, _described, _engine, _version
from tinkercloud.config import Config
from tinkercloud.core.types import LoraSpec, SampledSequence, SampleRequest, SamplingParams
from tinkercloud.weights.adapters import fresh_adapter, save_adapter

WEIGHTS = "model.safetensors"


def digest(path: Path, config: Config, adapter: Path | None = None) -> bytes:
    return _described(config, _base(config, path), path, adapter).digest


def sampled(path: Path, config: Config, adapter: Path | None) -> SampledSequence:
    engine = _engine(config, _version(_base(config, path), path, adapter))
    found: list[SampledSequence] = []
    request = SampleRequest(np.arange(5, dtype=np.int32), 1, SamplingParams(12, seed=1))
    engine.submit(request, lambda output: found.extend(output.sequences))
    while engine.busy:
        engine.step()
    return found[0]


def write_adapter(folder: Path, model: Path) -> Path:
    spec = LoraSpec(rank=4, seed=0)
    shapes = {
        name.removesuffix(".weight"): (tensor.shape[0], tensor.shape[1])
        for name, tensor in load_file(model / WEIGHTS).items()
        if tensor.ndim == 2 and "embed" not in name
    }
    adapter = fresh_adapter(spec, shapes, torch.device("cpu"))
    folder.mkdir()
    learned = {name: (a, torch.full_like(b, 0.05)) for name, (a, b) in adapter.items()}
    save_adapter(learned, spec, "tiny", folder)
    return folder


def test_its_digest_is_that_of_the_weights_too(tmp_path: Path) -> None:
    """Of a model with the same name and config, and one number of one tensor changed."""
    config = Config(data_dir=tmp_path)
    first = write_tiny_model(tmp_path / "one" / "model")
    copy = Path(shutil.copytree(first, tmp_path / "two" / "model"))
    assert digest(first, config) == digest(copy, config)
    tensors = load_file(copy / WEIGHTS)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, copy / WEIGHTS, {"format": "pt"})
    assert digest(first, config) != digest(copy, config)


def test_it_verifies_with_an_adapter(tmp_path: Path) -> None:
    config = Config(data_dir=tmp_path)
    model = write_tiny_model(tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter", model)
    assert digest(model, config) != digest(model, config, adapter)
    plain, adapted = sampled(model, config, None), sampled(model, config, adapter)
    assert not np.array_equal(plain.logprobs, adapted.logprobs)
    assert np.array_equal(adapted.logprobs, sampled(model, config, adapter).logprobs)
