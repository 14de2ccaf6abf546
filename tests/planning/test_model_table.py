"""Reading configs: parameters as published, refusals by name, both spellings of transformers."""

import pytest

from tests.planning.public_configs import NAMES, REFUSED, TRAINABLE, public_config
from tinkercloud.errors import PlanRefused
from tinkercloud.planning.model_table import ROWS, read_shape, untrainable

# As the hubs' safetensors indices count them; of DeepSeek-V3 and GLM-4.5 without the draft layer.
PUBLISHED = {
    "DeepSeek-V3": 671_026_419_200,
    "GLM-4.5-Air": 106_852_251_264,
    "Llama-2-7B": 6_738_415_616,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.2-1B": 1_235_814_400,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Mixtral-8x7B": 46_702_792_704,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-8B": 8_190_735_360,
    "SmolLM2-135M": 134_515_008,
    "gemma-3-1b": 999_885_952,
    "gemma-3-27b-it": 27_009_346_304,  # without the vision tower
    "gpt-oss-20b": 20_914_757_184,
}
# Billions, rounded as their authors do.
ACTIVE = {
    "DeepSeek-V3": 37,
    "Mixtral-8x7B": 12.9,
    "Qwen3-235B-A22B": 22,
    "Qwen3-30B-A3B": 3.3,
}


def why(name: str, seq_len: int = 64, **changes: object) -> str:
    return "; ".join(untrainable(read_shape(public_config(name, **changes)), seq_len))


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_the_published_number(name):
    assert read_shape(public_config(name)).parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_the_published_share(name):
    active = read_shape(public_config(name)).active_parameters / 1e9
    assert active == pytest.approx(ACTIVE[name], rel=0.02)


@pytest.mark.parametrize("name", TRAINABLE)
def test_supported_networks_are_trainable(name):
    assert why(name) == ""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_by_name_with_its_parameters(name):
    reason = why(name)
    assert reason.startswith(f"{public_config(name)['architectures'][0]}, {PUBLISHED[name]:,}")
    assert "cannot be trained" in reason


def test_every_architecture_has_a_public_config_among_the_tests():
    seen = {public_config(name)["architectures"][0] for name in NAMES}
    assert seen == set(ROWS)


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen3-8B", "DeepSeek-V3", "GLM-4.5-Air"])
def test_both_spellings_of_rotary_settings_mean_the_same(name):
    old = public_config(name)
    new = dict(old)
    rope = {"rope_theta": new.pop("rope_theta"), **(new.pop("rope_scaling", None) or {})}
    rope["rope_type"] = rope.pop("type", rope.get("rope_type", "default"))
    if "partial_rotary_factor" in new:
        rope["partial_rotary_factor"] = new.pop("partial_rotary_factor")
    new["rope_parameters"] = rope
    assert read_shape(new) == read_shape(old)


def test_a_sliding_window_in_use_limits_the_sequence():
    changed = {"sliding_window": 4096}
    assert why("Mistral-7B-v0.3", 4096, **changed) == ""
    assert "sliding window of 4096" in why("Mistral-7B-v0.3", 4097, **changed)


def test_a_window_that_qwen_switches_off_limits_nothing():
    assert why("Qwen2.5-0.5B", 32768, sliding_window=128) == ""
    on = {"sliding_window": 128, "use_sliding_window": True}
    assert why("Qwen2.5-0.5B", 4096, **on, max_window_layers=24) == ""
    assert "sliding window" in why("Qwen2.5-0.5B", 4096, **on, max_window_layers=12)


def _llama3(**changes):
    return {"rope_scaling": public_config("Llama-3.1-8B")["rope_scaling"] | changes}


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("Llama-3.1-8B", _llama3(low_freq_factor=2.0), "Megatron-core has 1, 4 and 8192 built in"),
        ("Llama-3.1-8B", _llama3(original_max_position_embeddings=4096), "original length 4096"),
        ("Qwen3-8B", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ("Qwen3-8B", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "'dynamic'"),
        ("Llama-3.1-8B", {"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ("Llama-3.1-8B", {"attention_bias": True}, "output projection"),
        ("Llama-3.1-8B", {"mlp_bias": True}, "mlp_bias"),
        ("Llama-3.1-8B", {"hidden_act": "gelu"}, "activation 'gelu'"),
        ("DeepSeek-V3", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("DeepSeek-V3", {"rope_interleave": False}, "rope_interleave"),
        ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func"),
        ("DeepSeek-V3", {"topk_method": "greedy"}, "topk_method"),
    ],
)
def test_what_megatron_lacks_is_named(name, changes, reason):
    assert reason in why(name, **changes)


def test_fp8_weights_are_no_obstacle():
    assert read_shape(public_config("DeepSeek-V3")).quantization == "fp8"
    assert why("DeepSeek-V3") == ""


@pytest.mark.parametrize("names", [["BertModel"], [], None, "LlamaForCausalLM", [7]])
def test_unknown_architectures_are_refused_with_the_known_ones(names):
    with pytest.raises(PlanRefused, match="known: LlamaForCausalLM"):
        read_shape(public_config("Qwen3-8B", architectures=names))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": None},
        {"hidden_size": "4096"},
        {"hidden_size": -1},
        {"hidden_size": True},
        {"num_hidden_layers": 10**9},
        {"rms_norm_eps": "small"},
        {"rope_theta": float("nan")},
        {"tie_word_embeddings": "yes"},
        {"rope_scaling": [1]},
        {"num_key_value_heads": 5},
        {"hidden_act": 3},
    ],
)
def test_damaged_figures_are_refused_by_name(changes):
    with pytest.raises(PlanRefused, match=r"config\.json: (\w+)|cannot share"):
        read_shape(public_config("Qwen3-8B", **changes))


def test_more_chosen_experts_than_there_are_is_refused():
    with pytest.raises(PlanRefused, match="200 experts per token of 128"):
        read_shape(public_config("Qwen3-30B-A3B", num_experts_per_tok=200))


def test_dense_layers_between_experts_are_seen():
    shape = read_shape(public_config("DeepSeek-V3"))
    assert shape.expert_layers == (False,) * 3 + (True,) * 58
    mixed = public_config("Qwen3-30B-A3B", decoder_sparse_step=2, mlp_only_layers=[1])
    assert [
        i for i, has_experts in enumerate(read_shape(mixed).expert_layers) if has_experts
    ] == list(range(3, 48, 2))
