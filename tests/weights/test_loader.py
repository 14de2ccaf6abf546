"""Folders that do not hold what they should, and those that hold a little more."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.architectures.loaded_model import load_model
from tests.architectures.networks import random_network
from tinkercloud.errors import ConfigError
from tinkercloud.weights.loader import read_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_network("Llama").save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model(folder, torch.float32, "cpu")
    return str(caught.value)


def test_a_missing_tensor_is_listed(folder):
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "missing: model.layers.1.mlp.up_proj" in refused(folder)


def test_an_unexpected_tensor_is_listed(folder):
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}))
    assert "unexpected: model.layers.0.self_attn.q_proj.bias" in refused(folder)


def test_a_tensor_of_the_wrong_shape_is_listed_with_both_shapes(folder):
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    assert "of the wrong shape: model.norm is (63,), not (64,)" in refused(folder)


def test_a_long_list_of_faults_is_cut(folder):
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "mlp" in name])
    assert "and 1 more" in refused(folder)


def test_leftovers_of_old_checkpoints_are_ignored(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(8)}))
    assert name not in load_model(folder, torch.float32, "cpu").weights


def test_a_stored_output_matrix_of_a_tied_model_is_ignored(tmp_path):
    random_network("Qwen2", tie_word_embeddings=True).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(96, 64)}))
    weights = load_model(tmp_path, torch.float32, "cpu").weights
    assert weights["lm_head"] is weights["model.embed_tokens"]
    assert weights["lm_head"].abs().sum() > 0


def test_pickled_weights_are_never_opened(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "neither model.safetensors nor" in refused(folder)


def test_a_cut_safetensors_file_is_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "not a whole safetensors file" in refused(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "absent.safetensors"])
def test_an_index_may_only_name_files_of_its_folder(folder, name):
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"weight_map": {"lm_head.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert name in refused(folder)


@pytest.mark.parametrize("index", ["[]", '{"weight_map": 3}', '{"weight_map": {"x": 3}}', "{"])
def test_a_damaged_index_is_refused(folder, index):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in refused(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff"])
def test_a_damaged_config_is_refused(folder, content):
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    assert "config.json" in refused(folder)


def test_a_path_that_does_not_exist_is_refused(tmp_path):
    assert "no model at" in refused(tmp_path / "nothing")


def test_a_file_that_is_not_gguf_is_refused(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "does not begin with the letters GGUF" in refused(path)


def test_the_end_tokens_of_the_generation_config_are_added(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    assert read_config(folder).eos_token_ids == (2, 5)


def test_a_damaged_generation_config_is_refused(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": {"id": 1}}))
    assert "wrong eos_token_id" in refused(folder)


def test_weights_come_in_the_type_asked_for(folder):
    weights = load_model(folder, torch.bfloat16, "cpu").weights
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
