"""Reading a Hugging Face config.json: both layouts, defaults, and what is refused."""

import pickle
import subprocess
import sys

import pytest

from tinkercloud.architectures import ARCHITECTURES, load_architecture
from tinkercloud.architectures.config import from_hf
from tinkercloud.errors import ConfigError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}


def test_what_a_config_leaves_out_has_the_defaults_of_hugging_face():
    config = from_hf(LLAMA)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert (config.rope_theta, config.rope_scaling) == (10000.0, None)
    assert config.rms_norm_eps == 1e-6
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == () and config.bos_token_id is None
    assert from_hf(QWEN3).head_dim == 128


@pytest.mark.parametrize(
    ("raw", "biases"),
    [
        (LLAMA, (False, False, False)),
        (LLAMA | {"attention_bias": True, "mlp_bias": True}, (True, True, True)),
        (QWEN2, (True, False, False)),
        (QWEN3, (False, False, False)),
        (QWEN3 | {"attention_bias": True}, (True, True, False)),
    ],
)
def test_each_family_has_its_biases(raw, biases):
    config = from_hf(raw)
    assert (config.attention_bias, config.output_bias, config.mlp_bias) == biases


def test_only_qwen3_norms_its_heads():
    assert [from_hf(raw).qk_norm for raw in (LLAMA, QWEN2, QWEN3)] == [False, False, True]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": YARN | {"rope_type": "yarn"}},
        {"rope_theta": 5e5, "rope_scaling": YARN | {"type": "yarn"}},
        {"rope_parameters": YARN | {"rope_type": "yarn", "rope_theta": 5e5}},
        {"rope_parameters": YARN | {"rope_type": "yarn", "type": "yarn"}, "rope_theta": 5e5},
    ],
)
def test_both_layouts_of_rotary_scaling_read_alike(rope):
    config = from_hf(LLAMA | rope)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == YARN | {"rope_type": "yarn"}


def test_the_original_length_defaults_to_the_position_limit():
    rope = {"rope_scaling": {"type": "yarn", "factor": 2.0}, "max_position_embeddings": 777}
    scaling = from_hf(LLAMA | rope).rope_scaling
    assert scaling is not None and scaling["original_max_position_embeddings"] == 777


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (0, (0,)), (7, (7,)), ([7, 8], (7, 8))])
def test_eos_may_be_null_one_or_several(value, ids):
    assert from_hf(LLAMA | {"eos_token_id": value}).eos_token_ids == ids


def test_a_declared_but_unused_sliding_window_is_accepted():
    raw = QWEN2 | {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 1}
    assert from_hf(raw).model_type == "qwen2"
    raw = QWEN2 | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2}
    assert from_hf(raw).model_type == "qwen2"


def test_the_model_type_stands_in_for_missing_architectures():
    raw = {key: value for key, value in QWEN3.items() if key != "architectures"}
    assert from_hf(raw).name == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM is not supported"),
        ({"architectures": [], "model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"num_local_experts": 8}, "mixtures of experts"),
        ({"vision_config": {"depth": 2}}, "vision_config"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        (
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "sliding-window",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "factors", "factors": [1.0]}}, "'factors' is not"),
        ({"rope_scaling": {"type": "linear"}}, "needs a positive 'factor'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'low_freq_factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"num_key_value_heads": 0}, "num_kv_heads is 0"),
        ({"num_attention_heads": 0}, "num_heads is 0"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"num_hidden_layers": 10**9}, "num_layers is 1000000000"),
        ({"hidden_size": "large"}, "wrong kind"),
        ({"vocab_size": None}, "no 'vocab_size'"),
        ({"rope_theta": -1.0}, "rope_theta must be positive"),
    ],
    ids=str,
)
def test_what_cannot_be_computed_is_refused_with_the_reason(change, reason):
    with pytest.raises(ConfigError, match=reason):
        from_hf(LLAMA | change)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_a_missing_size_is_named(key):
    with pytest.raises(ConfigError, match=key):
        from_hf({name: value for name, value in LLAMA.items() if name != key})


def test_a_config_travels_between_processes():
    config = from_hf(LLAMA | {"rope_scaling": YARN | {"type": "yarn"}})
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(from_hf(LLAMA | {"rope_scaling": YARN | {"type": "yarn"}}))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_table_loads_every_class(name):
    assert load_architecture(name).__module__ == ARCHITECTURES[name].partition(":")[0]


def test_an_architecture_outside_the_table_is_refused():
    with pytest.raises(ConfigError, match=r"'GPT2LMHeadModel'.*LlamaForCausalLM"):
        load_architecture("GPT2LMHeadModel")


def test_the_table_and_the_config_need_no_torch():
    code = (
        "import sys, tinkercloud.architectures.config, tinkercloud.losses; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
