"""Our networks against transformers, in float32, through saved folders and packed sequences."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.architectures.loaded_model import load_model
from tests.architectures.networks import (
    FAMILIES,
    our_logits,
    random_network,
    random_sequences,
    reference_logits,
)
from tinkercloud.architectures.config import from_hf
from tinkercloud.architectures.layers import gated, rms_norm, rotary_frequencies, rotate
from tinkercloud.architectures.llama import Llama
from tinkercloud.weights.gguf_file import GGUFFile
from tinkercloud.weights.gguf_tokenizer import build_tokenizer
from tinkercloud.weights.loader import read_config

TOLERANCE = 2e-5

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 100000.0},
    "linear": LINEAR,
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-betas": YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 0.7},
    "yarn-mscale": YARN | {"mscale": 1.2, "mscale_all_dim": 0.8},
    "yarn-untruncated": YARN | {"truncate": False},
}
VARIANTS = [
    ("Llama", {}),
    ("Llama", {"tie_word_embeddings": True}),
    ("Llama", {"num_key_value_heads": 1}),
    ("Llama", {"num_key_value_heads": 4}),
    ("Llama", {"head_dim": 24}),
    ("Llama", {"attention_bias": True, "mlp_bias": True}),
    ("Qwen2", {}),
    ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("Qwen3", {"head_dim": 16}),
    ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    ("Qwen3", {"head_dim": 32, "attention_bias": True}),
    ("Qwen3", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    ("Mistral", {}),
    ("Mistral", {"sliding_window": None, "head_dim": 24}),
    ("Gemma2", {}),
    ("Gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("Gemma3", {}),
    ("Gemma3", {"attention_bias": True, "tie_word_embeddings": False}),
    ("Ministral", {}),
    ("Ministral", {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}),
    ("Ernie4_5", {}),
    ("Ernie4_5", {"use_bias": False, "tie_word_embeddings": False}),
    ("Helium", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    ("Olmo2", {}),
    ("Olmo2", {"attention_bias": True, "num_key_value_heads": 1}),
    ("Granite", {}),
    ("Granite", {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("family", "overrides"), VARIANTS, ids=str)
def test_logits_of_packed_sequences_equal_transformers(family, overrides, tmp_path):
    reference = random_network(family, **overrides)
    reference.save_pretrained(tmp_path)
    sequences = random_sequences(9, 1, 70)
    expected = reference_logits(reference, sequences)
    actual = our_logits(load_model(tmp_path, torch.float32, "cpu"), sequences)
    assert expected.std() > 0.3, "the comparison needs logits that differ from each other"
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rope", ROPES)
def test_logits_under_each_rotary_scaling_equal_transformers(family, rope, tmp_path):
    scaling = dict(ROPES[rope])
    if family == "Gemma3":
        if "yarn" in rope:
            pytest.skip("transformers has no YaRN for it")
        scaling = {"full_attention": scaling, "sliding_attention": ROPES["default"]}
    reference = random_network(family, head_dim=16, rope_parameters=scaling)
    reference.save_pretrained(tmp_path)
    sequences = random_sequences(200)
    expected = reference_logits(reference, sequences)
    actual = our_logits(load_model(tmp_path, torch.float32, "cpu"), sequences)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("rope", ROPES)
def test_logits_at_far_positions_equal_transformers(rope, tmp_path):
    reference = random_network("Llama", rope_parameters=dict(ROPES[rope]))
    reference.save_pretrained(tmp_path)
    sequences = random_sequences(12, 30)
    expected = reference_logits(reference, sequences, start=30_000)
    actual = our_logits(load_model(tmp_path, torch.float32, "cpu"), sequences, start=30_000)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rope", sorted(set(ROPES) - {"default"}))
def test_each_rotary_scaling_changes_the_logits(rope, tmp_path):
    random_network("Llama", rope_parameters=dict(ROPES[rope])).save_pretrained(tmp_path)
    scaled = load_model(tmp_path, torch.float32, "cpu")
    plain = random_network("Llama", rope_parameters={**ROPES["default"], "rope_theta": 10000.0})
    sequences = random_sequences(200)
    difference = our_logits(scaled, sequences) - reference_logits(plain, sequences)
    assert difference.abs().max() > 1e-2


def test_a_sharded_folder_equals_transformers(tmp_path):
    reference = random_network("Qwen3", head_dim=16)
    reference.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    sequences = random_sequences(20)
    actual = our_logits(load_model(tmp_path, torch.float32, "cpu"), sequences)
    expected = reference_logits(reference, sequences)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("family", "overrides"), VARIANTS, ids=str)
def test_the_number_of_parameters_is_that_of_transformers(family, overrides, tmp_path):
    reference = random_network(family, **overrides)
    reference.save_pretrained(tmp_path)
    expected = sum(parameter.numel() for parameter in reference.parameters())
    assert read_config(tmp_path).num_parameters == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_linear_shapes_are_the_linears_of_transformers(family, tmp_path):
    reference = random_network(family, head_dim=16, tie_word_embeddings=True)
    reference.save_pretrained(tmp_path)
    linears = {
        name: tuple(module.weight.shape)
        for name, module in reference.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert read_config(tmp_path).linear_shapes() == linears


def test_tied_embeddings_are_one_tensor(tmp_path):
    random_network("Llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    weights = load_model(tmp_path, torch.float32, "cpu").weights
    assert weights["lm_head"] is weights["model.embed_tokens"]


def test_the_gradient_of_the_logits_equals_transformers(tmp_path):
    reference = random_network("Qwen3", head_dim=16)
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32, "cpu")
    tokens = random_sequences(12)[0]
    probe = torch.randn(12, 96, generator=torch.Generator().manual_seed(5))
    (reference(tokens[None], use_cache=False).logits[0] * probe).sum().backward()
    for weight in model.weights.values():
        weight.requires_grad_()
    with torch.enable_grad():
        # `our_logits` carries no_grad; what it wraps does not.
        (our_logits.__wrapped__(model, [tokens]) * probe).sum().backward()
    for name, parameter in reference.named_parameters():
        ours = model.weights[name.removesuffix(".weight")].grad
        torch.testing.assert_close(ours, parameter.grad, atol=1e-4, rtol=1e-4)


def test_a_row_does_not_depend_on_the_rows_packed_with_it():
    generator = torch.Generator().manual_seed(3)
    num_rows, heads, size = 257, 9, 64
    config = from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 8,
            "hidden_size": heads * size,
            "intermediate_size": 1536,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
        }
    )
    network = Llama(config, "cpu")
    x = torch.randn(num_rows, heads * size, generator=generator)
    gate, up = torch.randn(2, num_rows, 1536, generator=generator)
    weight, positions = torch.rand(heads * size, generator=generator), torch.arange(num_rows)

    def rowwise(part: slice) -> torch.Tensor:
        cos, sin = network.rotary(positions[part])
        normed = rms_norm(x[part], weight, 1e-5)
        turned = rotate(x[part].unflatten(-1, (heads, size)), cos, sin).flatten(1)
        return torch.cat((normed, turned, gated("silu", gate[part], up[part])), dim=-1)

    alone = torch.cat([rowwise(slice(row, row + 1)) for row in range(num_rows)])
    assert torch.equal(rowwise(slice(0, num_rows)), alone)


def test_bfloat16_activations_stay_bfloat16_and_near_float32(tmp_path):
    random_network("Qwen3", head_dim=16).save_pretrained(tmp_path)
    sequences = random_sequences(40)
    narrow = our_logits(load_model(tmp_path, torch.bfloat16, "cpu"), sequences)
    wide = our_logits(load_model(tmp_path, torch.float32, "cpu"), sequences)
    assert narrow.dtype == torch.bfloat16
    assert 1e-4 < (narrow.float() - wide).abs().mean() < 3e-2


def test_frequencies_of_plain_rope_are_powers_of_theta(tmp_path):
    random_network("Llama", rope_parameters=dict(ROPES["default"])).save_pretrained(tmp_path)
    frequencies, magnitude = rotary_frequencies(read_config(tmp_path))
    expected = [100000.0 ** (-2 * i / 16) for i in range(8)]
    assert frequencies.tolist() == pytest.approx(expected, rel=1e-6)
    assert magnitude == 1.0


@pytest.mark.slow
def test_smollm2_from_gguf_equals_transformers_on_real_text(smollm2_gguf: Path):
    folder, name = str(smollm2_gguf.parent), smollm2_gguf.name
    tokenizer = build_tokenizer(GGUFFile(smollm2_gguf).metadata)
    texts = [
        "The capital of France is Paris. In 1889 it built a tower 300 metres high.",
        "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    ]
    sequences = [torch.tensor(tokenizer.encode(text).ids) for text in texts]
    reference = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32
    ).eval()
    expected = reference_logits(reference, sequences)
    actual = our_logits(load_model(smollm2_gguf, torch.float32, "cpu"), sequences)
    assert (actual - expected).abs().max() < 1e-4
    nll = torch.nn.functional.cross_entropy(actual[: len(sequences[0]) - 1], sequences[0][1:])
    assert nll < 4.0, "far below the 10.8 of a network that knows nothing"
