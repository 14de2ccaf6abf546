"""Adapters in MLX-LM's files: the same weights come back, and what is no LoRA of this base is
refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.embedded.tiny import write_tiny_model
from tinkercloud.core.types import LoraSpec
from tinkercloud.errors import UserError
from tinkercloud.weights.adapter_folders import open_adapter
from tinkercloud.weights.adapters import Adapter, fresh_adapter
from tinkercloud.weights.loader import read_config
from tinkercloud.weights.mlx_adapters import MLX_FILE, write_mlx_adapter

SPEC = LoraSpec(4, 0, train_unembed=False, alpha=10.0)
Q_OF_FIRST = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("base"))


def trained(base: Path, spec: LoraSpec) -> Adapter:
    fresh = fresh_adapter(spec, read_config(base).linear_shapes(), torch.device("cpu"))
    return {name: (a, torch.randn_like(b)) for name, (a, b) in fresh.items()}


def test_an_adapter_comes_back_as_it_was(base: Path, tmp_path: Path) -> None:
    adapter = trained(base, SPEC)
    write_mlx_adapter(adapter, SPEC, 2, tmp_path)
    read = open_adapter(tmp_path, base)
    assert (read.format, read.spec.rank, read.spec.alpha) == ("mlx-lm", 4, 10.0)
    assert (read.spec.train_attn, read.spec.train_mlp, read.spec.train_unembed) == (
        True,
        True,
        False,
    )
    assert read.adapter.keys() == adapter.keys()
    for name, (a, b) in adapter.items():
        assert torch.equal(read.adapter[name][0], a)
        assert torch.equal(read.adapter[name][1], b)


def test_the_files_are_as_mlx_lm_documents_them(base: Path, tmp_path: Path) -> None:
    """y = W x + scale (x lora_a) lora_b, with names of the model's modules."""
    adapter = trained(base, SPEC)
    write_mlx_adapter(adapter, SPEC, 2, tmp_path)
    tensors = load_file(tmp_path / MLX_FILE)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["fine_tune_type"] == "lora"
    assert config["num_layers"] == 2
    assert config["lora_parameters"]["rank"] == 4
    assert "self_attn.q_proj" in config["lora_parameters"]["keys"]
    a, b = adapter[Q_OF_FIRST]
    x = torch.randn(3, a.shape[1])
    theirs = (
        config["lora_parameters"]["scale"]
        * (x @ tensors[f"{Q_OF_FIRST}.lora_a"])
        @ tensors[f"{Q_OF_FIRST}.lora_b"]
    )
    torch.testing.assert_close(theirs, (SPEC.alpha / SPEC.rank) * (x @ a.T @ b.T))


def test_layers_that_are_not_adapted_stay_as_they_are(base: Path, tmp_path: Path) -> None:
    write_mlx_adapter(trained(base, SPEC), SPEC, 1, tmp_path)
    path = tmp_path / MLX_FILE
    save_file({n: t for n, t in load_file(path).items() if ".layers.1." in n}, path)
    read = open_adapter(tmp_path, base).adapter
    assert not read[Q_OF_FIRST][1].any()
    assert read["model.layers.1.self_attn.q_proj"][1].any()


def test_what_cannot_be_had_exactly_is_refused(base: Path, tmp_path: Path) -> None:
    of_unembedding = LoraSpec(4, 0)
    with pytest.raises(UserError, match="lm_head"):
        write_mlx_adapter(trained(base, of_unembedding), of_unembedding, 2, tmp_path)
    write_mlx_adapter(trained(base, SPEC), SPEC, 2, tmp_path)
    tensors = load_file(tmp_path / MLX_FILE)
    magnitude = {f"{Q_OF_FIRST}.m": torch.ones(48)}
    for others, said in (
        ({**tensors, **magnitude}, "no tensor of LoRA"),
        ({**tensors, f"{Q_OF_FIRST}.lora_a": torch.ones(5, 4)}, "this base model needs"),
        (
            {"model.layers.9.mlp.up_proj.lora_a": torch.ones(48, 4)},
            "lacks: model.layers.9.mlp.up_proj",
        ),
    ):
        save_file(others, tmp_path / MLX_FILE)
        with pytest.raises(UserError, match=said):
            open_adapter(tmp_path, base)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({"fine_tune_type": "dora", "lora_parameters": {}}))
    with pytest.raises(UserError, match="MLX-LM"):
        open_adapter(tmp_path, base)
    parameters = {"rank": 4, "scale": 1.0}
    config.write_text(json.dumps({"fine_tune_type": "dora", "lora_parameters": parameters}))
    with pytest.raises(UserError, match="'dora', not LoRA"):
        open_adapter(tmp_path, base)
