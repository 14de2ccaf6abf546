"""GGUF files unpacked for engines that read Hugging Face folders only."""

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.architectures.loaded_model import load_model
from tests.architectures.networks import (
    GGUF_FAMILIES,
    random_network,
    random_sequences,
    reference_logits,
    round_to,
    write_gguf,
)
from tinkercloud.errors import ConfigError
from tinkercloud.weights.huggingface import ensure_hf_folder
from tinkercloud.weights.loader import read_config


@pytest.mark.parametrize("family", GGUF_FAMILIES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_transformers_computes_the_same_from_an_unpacked_file(family, tied, tmp_path):
    reference = random_network(family, head_dim=16, tie_word_embeddings=tied)
    file = write_gguf(reference, tmp_path / "model.gguf", Kind.Q8_0)
    round_to(reference, Kind.Q8_0)
    folder = ensure_hf_folder(file, tmp_path / "cache")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sequences = random_sequences(30)
    torch.testing.assert_close(
        reference_logits(loaded, sequences), reference_logits(reference, sequences), atol=0, rtol=0
    )


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_the_unpacked_file_loads_here_as_the_file_does(family, tmp_path):
    reference = random_network(family, head_dim=16)
    file = write_gguf(reference, tmp_path / "model.gguf", Kind.Q4_0)
    folder = ensure_hf_folder(file, tmp_path / "cache")
    assert read_config(folder) == read_config(file)
    ours, theirs = (load_model(path, torch.float32, "cpu").weights for path in (folder, file))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_file_is_unpacked_once_and_a_folder_never(tmp_path):
    reference = random_network("Llama")
    file = write_gguf(reference, tmp_path / "model.gguf", Kind.F16)
    folder = ensure_hf_folder(file, tmp_path / "cache")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert ensure_hf_folder(file, tmp_path / "cache") == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert ensure_hf_folder(folder, tmp_path / "other") == folder
    assert not (tmp_path / "other").exists()


def test_a_damaged_file_leaves_nothing_behind(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(ConfigError):
        ensure_hf_folder(file, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_small_model_keeps_its_tokenizer(smollm2_gguf, tmp_path):
    folder = ensure_hf_folder(smollm2_gguf, tmp_path, torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("First light.")) == "First light."
    assert read_config(folder) == read_config(smollm2_gguf)
