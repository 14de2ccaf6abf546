"""GGUF files written here, read back, against the folder that holds the same weights."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tests.architectures.loaded_model import load_model
from tests.architectures.networks import (
    GGUF_FAMILIES,
    our_logits,
    random_network,
    random_sequences,
    reference_logits,
    round_to,
    write_gguf,
)
from tinkercloud.architectures.layers import rotary_frequencies
from tinkercloud.errors import ConfigError
from tinkercloud.weights.gguf_file import GGUFFile
from tinkercloud.weights.loader import read_config

KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]


@pytest.mark.parametrize("family", GGUF_FAMILIES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_gguf_file_equals_the_folder_of_its_dequantised_weights(family, kind, tmp_path):
    reference = random_network(family, head_dim=16)
    file = write_gguf(reference, tmp_path / "model.gguf", kind)
    round_to(reference, kind)
    reference.save_pretrained(tmp_path)
    ours, folder = (load_model(path, torch.float32, "cpu") for path in (file, tmp_path))
    assert ours.weights.keys() == folder.weights.keys()
    for name, expected in folder.weights.items():
        assert torch.equal(ours.weights[name], expected), name


@pytest.mark.parametrize("family", GGUF_FAMILIES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_gguf_file_has_the_config_of_the_folder(family, tied, tmp_path):
    reference = random_network(family, head_dim=16, tie_word_embeddings=tied)
    file = write_gguf(reference, tmp_path / "model.gguf", Kind.F16)
    reference.save_pretrained(tmp_path)
    ours, folder = read_config(file), read_config(tmp_path)
    assert ours.rms_norm_eps == pytest.approx(folder.rms_norm_eps)
    for field in set(type(folder).__slots__) - {"rms_norm_eps"}:
        assert getattr(ours, field) == getattr(folder, field), field


def test_the_biases_of_llama_are_put_apart_like_the_weights(tmp_path):
    reference = random_network("Llama", attention_bias=True)
    file = write_gguf(reference, tmp_path / "model.gguf", Kind.F32)
    sequences = random_sequences(30)
    actual = our_logits(load_model(file, torch.float32, "cpu"), sequences)
    expected = reference_logits(reference, sequences)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)


def test_a_tied_file_uses_the_embedding_as_its_output(tmp_path):
    reference = random_network("Qwen2", tie_word_embeddings=True)
    weights = load_model(
        write_gguf(reference, tmp_path / "model.gguf", Kind.F32), torch.float32, "cpu"
    ).weights
    assert weights["lm_head"] is weights["model.embed_tokens"]


def test_large_tensors_are_dequantised_in_blocks_without_a_seam(tmp_path, monkeypatch):
    reference = random_network("Llama")
    file = write_gguf(reference, tmp_path / "model.gguf", Kind.Q8_0)
    whole = load_model(file, torch.bfloat16, "cpu").weights
    monkeypatch.setattr("tinkercloud.weights.gguf_loader._ELEMENTS_AT_ONCE", 64 * 5)
    blocks = load_model(file, torch.bfloat16, "cpu").weights
    assert all(torch.equal(whole[name], blocks[name]) for name in whole)


def test_a_k_quant_is_decoded_as_ggml_defines_it(tmp_path):
    random = np.random.default_rng(4)
    block = random.integers(0, 256, 210, dtype=np.uint8)
    block[208:] = np.frombuffer(struct.pack("<e", 0.037), np.uint8)
    path = tmp_path / "one.gguf"
    path.write_bytes(_file_with_one_tensor("x", 256, Kind.Q6_K, block.tobytes()))
    assert GGUFFile(path).rows("x", 0, 1)[0].tolist() == pytest.approx(_decode_q6_k(block))


def test_frequency_divisors_stand_for_the_llama3_scaling(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 50000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    reference = random_network("Llama", rope_parameters=rope)
    reference.save_pretrained(tmp_path)
    expected, _ = rotary_frequencies(read_config(tmp_path))
    plain = torch.tensor([50000.0 ** (-i / 8) for i in range(8)])
    factors = (plain / expected).numpy()
    assert factors.max() == pytest.approx(8.0, rel=1e-5) and factors.min() == pytest.approx(1.0)
    file = write_gguf(reference, tmp_path / "model.gguf", Kind.F32, factors=factors)
    sequences = random_sequences(150)
    actual = our_logits(load_model(file, torch.float32, "cpu"), sequences)
    torch.testing.assert_close(actual, reference_logits(reference, sequences), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("rope", "extra"),
    [
        (
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        ),
        (
            {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
            },
        ),
        (
            {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 8.0,
                "attention_factor": 0.5 * (0.1 * np.log(4.0) + 1.0),
            },
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
                "rope.scaling.yarn_beta_fast": 8.0,
                "rope.scaling.yarn_attn_factor": 0.5,
            },
        ),
    ],
    ids=["linear", "yarn", "yarn-tuned"],
)
def test_rotary_scalings_in_the_metadata_equal_those_of_transformers(rope, extra, tmp_path):
    reference = random_network("Qwen2", rope_parameters=rope)
    file = write_gguf(reference, tmp_path / "model.gguf", Kind.F32, extra=extra)
    sequences = random_sequences(150)
    actual = our_logits(load_model(file, torch.float32, "cpu"), sequences)
    torch.testing.assert_close(actual, reference_logits(reference, sequences), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"expert_count": 8}, "experts"),
        ({"attention.sliding_window": 64}, "sliding-window"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, "'longrope'"),
        ({"rope.dimension_count": 8}, "rotary dimensions"),
        ({"attention.value_length": 8}, "value heads"),
    ],
)
def test_what_is_not_computed_here_is_refused_with_the_reason(extra, reason, tmp_path):
    file = write_gguf(random_network("Qwen2"), tmp_path / "model.gguf", Kind.F32, extra=extra)
    with pytest.raises(ConfigError, match=reason):
        read_config(file)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    file = write_gguf(random_network("Qwen3", head_dim=16), tmp_path / "model.gguf", Kind.Q8_0)
    whole = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (0, 3, 4, 20, 100, 1000, len(whole) // 2, len(whole) - 64):
        cut.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"cut\.gguf is not a whole GGUF file"):
            read_config(cut)


def test_a_header_with_any_byte_changed_never_fails_otherwise_than_by_name(tmp_path):
    file = write_gguf(random_network("Llama"), tmp_path / "model.gguf", Kind.F32)
    whole, random = file.read_bytes(), np.random.default_rng(9)
    damaged, refused = tmp_path / "damaged.gguf", 0
    for offset in random.integers(0, 2500, 300):
        content = bytearray(whole)
        content[offset] ^= int(random.integers(1, 256))
        damaged.write_bytes(content)
        try:
            load_model(damaged, torch.float32, "cpu")
        except ConfigError:
            refused += 1
    assert refused > 100


def test_missing_and_unexpected_tensors_are_listed(tmp_path):
    file = write_gguf(random_network("Llama"), tmp_path / "model.gguf", Kind.F32)
    file.write_bytes(file.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(ConfigError) as caught:
        load_model(file, torch.float32, "cpu")
    assert "missing: model.layers.1.mlp.up_proj" in str(caught.value)
    assert "unexpected: blk.1.ffn_xx.weight" in str(caught.value)


def test_smollm2_is_what_its_file_says(smollm2_gguf: Path):
    config = read_config(smollm2_gguf)
    assert config.name == "LlamaForCausalLM"
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.rope_theta == 100000.0 and config.max_position_embeddings == 8192
    assert config.tie_word_embeddings and config.eos_token_ids == (2,)
    assert config.num_parameters == 134_515_008


def _file_with_one_tensor(name: str, width: int, kind: Kind, data: bytes) -> bytes:
    """A GGUF file by hand: no metadata, one vector, data at the next multiple of 32."""
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)
    header += struct.pack("<Q", len(name)) + name.encode()
    header += struct.pack("<IQIQ", 1, width, kind, 0)
    return header + bytes(-len(header) % 32) + data


def _decode_q6_k(block: np.ndarray) -> list[float]:
    """256 six-bit numbers: low nibbles in ql, two high bits in qh, a scale for every 16."""
    ql, qh = block[:128].tolist(), block[128:192].tolist()
    scales = block[192:208].view(np.int8).tolist()
    d = float(block[208:].view(np.float16)[0])
    values = [0.0] * 256
    for half in range(2):
        for quarter in range(4):
            for i in range(32):
                low = ql[64 * half + 32 * (quarter % 2) + i] >> (4 * (quarter // 2)) & 15
                high = qh[32 * half + i] >> (2 * quarter) & 3
                index = 128 * half + 32 * quarter + i
                values[index] = d * scales[index // 16] * ((low | high << 4) - 32)
    return values
