"""What the contenders of the training benchmark begin with."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from tinkercloud.architectures.config import ArchitectureConfig
from tinkercloud.core.types import LoraSpec
from tinkercloud.weights.adapters import adapted_modules, fresh_adapter, save_adapter
from tinkercloud.weights.loader import read_config

RANK = 32


@dataclass(frozen=True)
class Start:
    """What the contenders of one kind of adapter begin with. model: a Hugging Face folder;
    adapter: in PEFT's format."""

    model: Path
    adapter: Path
    spec: LoraSpec
    config: ArchitectureConfig

    @property
    def flop_per_token(self) -> float:
        """Forward 2 and gradient of the input 2 per frozen weight; for the adapter's weights their
        own gradient too. Norms, softmax and what is computed twice do not count."""
        shapes = self.config.linear_shapes()
        frozen = sum(rows * columns for rows, columns in shapes.values())
        adapter = sum(self.spec.rank * sum(shapes[m]) for m in adapted_modules(self.spec, shapes))
        return 4.0 * frozen + 6.0 * adapter

    def apart(self, a: Path, b: Path) -> float:
        """The distance of two trained adapters, over the length of the way from the start to b."""
        start, first, second = (_tensors(folder) for folder in (self.adapter, a, b))
        return _distance(first, second) / _distance(start, second)


def prepare(root: Path, model: Path, *, unembedding: bool) -> Start:
    """A start whose B is not zero: there nothing would reach A."""
    spec, config = LoraSpec(RANK, seed=0, train_unembed=unembedding), read_config(model)
    tensors = fresh_adapter(spec, config.linear_shapes(), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for _, b in tensors.values():
        b.normal_(0, 0.01, generator=generator)
    adapter = Path(tempfile.mkdtemp(dir=root))
    save_adapter(tensors, spec, str(model), adapter)
    return Start(model, adapter, spec, config)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "adapter_model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if ".lora_" in name}


def _distance(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return sum(float((a[name] - b[name]).square().sum()) for name in a) ** 0.5
