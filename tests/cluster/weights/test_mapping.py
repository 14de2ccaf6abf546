"""The mapping alone: names of Transformer Engine's layers, which no CPU can build, and shards."""

import pytest
import torch
from torch import Tensor, nn

from tinkercloud.cluster.weights.mapping import (
    Columns,
    Entry,
    Form,
    FusedQKV,
    Replicated,
    Rows,
    Vocabulary,
    WeightMap,
)
from tinkercloud.errors import ConfigError
from tinkercloud.planning.plan import MegatronArguments

DENSE = MegatronArguments(
    num_layers=4, hidden_size=8, ffn_hidden_size=12, num_attention_heads=4, num_query_groups=2,
    kv_channels=3, layernorm_epsilon=1e-5, add_qkv_bias=True, qk_layernorm=True, vocab_size=7,
    padded_vocab_size=12, max_sequence_length=16, untie_embeddings_and_output_weights=True,
    rotary_base=1e4, num_moe_experts=8, moe_ffn_hidden_size=6, expert_model_parallel_size=2,
    moe_shared_expert_intermediate_size=10, moe_router_enable_expert_bias=True,
)  # fmt: skip
LATENT = MegatronArguments(
    num_layers=4, hidden_size=8, ffn_hidden_size=12, num_attention_heads=4, num_query_groups=4,
    kv_channels=3, layernorm_epsilon=1e-6, add_qkv_bias=False, qk_layernorm=True, vocab_size=7,
    padded_vocab_size=8, max_sequence_length=16, untie_embeddings_and_output_weights=True,
    rotary_base=1e4, multi_latent_attention=True, q_lora_rank=6, kv_lora_rank=5, qk_head_dim=3,
    qk_pos_emb_head_dim=2, v_head_dim=4,
)  # fmt: skip

LAYER, OFFSET = "decoder.layers.1.", 2  # the second layer of a stage that two layers precede
TRANSFORMER_ENGINE = {
    "self_attention.linear_qkv.layer_norm_weight": ["input_layernorm.weight"],
    "self_attention.linear_qkv.weight": [f"self_attn.{x}_proj.weight" for x in "qkv"],
    "self_attention.linear_qkv.bias": [f"self_attn.{x}_proj.bias" for x in "qkv"],
    "self_attention.linear_proj.weight": ["self_attn.o_proj.weight"],
    "self_attention.q_layernorm.weight": ["self_attn.q_norm.weight"],
    "self_attention.k_layernorm.weight": ["self_attn.k_norm.weight"],
    "mlp.linear_fc1.layer_norm_weight": ["post_attention_layernorm.weight"],
    "mlp.linear_fc1.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.linear_fc2.weight": ["mlp.down_proj.weight"],
    "pre_mlp_layernorm.weight": ["post_attention_layernorm.weight"],
    "mlp.router.weight": ["mlp.gate.weight"],
    "mlp.router.expert_bias": ["mlp.gate.e_score_correction_bias"],
    "mlp.experts.linear_fc1.weight2": [
        "mlp.experts.6.gate_proj.weight",
        "mlp.experts.6.up_proj.weight",
    ],
    "mlp.experts.linear_fc2.weight3": ["mlp.experts.7.down_proj.weight"],
    "mlp.shared_experts.linear_fc1.weight": [
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
    ],
    "mlp.shared_experts.linear_fc2.weight": ["mlp.shared_experts.down_proj.weight"],
}
TRANSFORMER_ENGINE_LATENT = {
    "input_layernorm.weight": ["input_layernorm.weight"],
    "self_attention.linear_q_down_proj.weight": ["self_attn.q_a_proj.weight"],
    "self_attention.linear_q_up_proj.layer_norm_weight": ["self_attn.q_a_layernorm.weight"],
    "self_attention.linear_q_up_proj.weight": ["self_attn.q_b_proj.weight"],
    "self_attention.linear_kv_down_proj.weight": ["self_attn.kv_a_proj_with_mqa.weight"],
    "self_attention.linear_kv_up_proj.layer_norm_weight": ["self_attn.kv_a_layernorm.weight"],
    "self_attention.linear_kv_up_proj.weight": ["self_attn.kv_b_proj.weight"],
}


class Stage(nn.Module):
    """The skeleton that the mapping looks at: layers that know their numbers, and latent
    attention's down projections, in the size that the layer kind gives them."""

    def __init__(self, down_rows: dict[str, int] | None = None):
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for index, layer in enumerate(self.decoder.layers):
            layer.layer_number = OFFSET + index + 1  # Megatron counts from one
            layer.self_attention = nn.Module()
            for name, rows in (down_rows or {}).items():
                linear = nn.Linear(8, rows, bias=False)
                layer.self_attention.add_module(name, linear)


def entry(name: str, arguments: MegatronArguments = DENSE, rows: dict | None = None) -> Entry:
    architecture = "DeepseekV3ForCausalLM" if rows else "Glm4MoeForCausalLM"
    return WeightMap(arguments, architecture, expert_rank=1).entry(LAYER + name, Stage(rows))


@pytest.mark.parametrize("name", TRANSFORMER_ENGINE)
def test_names_of_transformer_engine_have_their_counterparts(name):
    wanted = [f"model.layers.3.{rest}" for rest in TRANSFORMER_ENGINE[name]]
    assert list(entry(name).names) == wanted


@pytest.mark.parametrize("name", TRANSFORMER_ENGINE_LATENT)
def test_latent_attention_in_transformer_engine_has_its_counterparts(name):
    wanted = [f"model.layers.3.{rest}" for rest in TRANSFORMER_ENGINE_LATENT[name]]
    rows = {"linear_q_down_proj": 6, "linear_kv_down_proj": 7}
    assert list(entry(name, LATENT, rows).names) == wanted


@pytest.mark.parametrize(("rows", "split"), [((6, 7), "replicated"), ((3, 4), "tp")])
def test_down_projections_are_sharded_as_the_layer_spec_shards_them(rows, split):
    built = dict(zip(("linear_q_down_proj", "linear_kv_down_proj"), rows, strict=True))
    for name in built:
        assert entry(f"self_attention.{name}.weight", LATENT, built).split == split


def test_experts_are_sharded_over_their_own_ranks():
    found = entry("mlp.experts.linear_fc1.weight0")
    assert (found.is_expert, found.split) == (True, "etp")
    local = entry("mlp.experts.local_experts.0.linear_fc1.weight")
    assert (local.names, local.form) == (found.names, found.form)


def test_mixtral_names_its_experts_in_its_own_way():
    mapped = WeightMap(DENSE, "MixtralForCausalLM", expert_rank=0)
    path = "model.layers.3.block_sparse_moe."
    found = mapped.entry(f"{LAYER}mlp.experts.linear_fc1.weight1", Stage())
    assert found.names == (f"{path}experts.1.w1.weight", f"{path}experts.1.w3.weight")
    assert mapped.entry(f"{LAYER}mlp.router.weight", Stage()).names == (f"{path}gate.weight",)


def test_an_unknown_parameter_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"decoder\.layers\.1\.mlp\.novelty"):
        entry("mlp.novelty.weight")


FORMS: dict[str, tuple[Form, list[tuple[int, ...]]]] = {
    "replicated": (Replicated(), [(5,)]),
    "rows": (Rows(12), [(12, 3)]),
    "gate and up": (Rows(12), [(12, 3), (12, 3)]),
    "columns": (Columns(12), [(3, 12)]),
    "vocabulary": (Vocabulary(11, 12), [(11, 3)]),
    "vocabulary, a shard of padding alone": (Vocabulary(5, 12), [(5, 3)]),
    "qkv": (FusedQKV(4, 3, 2), [(24, 5), (8, 5), (8, 5)]),
    "qkv bias": (FusedQKV(4, 3, 2), [(24,), (8,), (8,)]),
}


def full_tensors(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", FORMS)
def test_unsharded_shards_are_the_full_tensors(name, size):
    form, shapes = FORMS[name]
    fulls = full_tensors(shapes)
    shards = [form.shard(fulls, rank, size) for rank in range(size)]
    assert len({shard.shape for shard in shards}) == 1
    for joined, full in zip(form.unshard(shards), fulls, strict=True):
        assert torch.equal(joined, full)


def test_padding_rows_of_the_vocabulary_are_zero():
    form, shapes = FORMS["vocabulary, a shard of padding alone"]
    (full,) = full_tensors(shapes)
    shards = [form.shard([full], rank, 3) for rank in range(3)]
    assert torch.equal(shards[1], torch.cat((full[4:], torch.zeros(3, 3))))
    assert torch.equal(shards[2], torch.zeros(4, 3))


def test_gate_and_up_are_sharded_each_and_stacked():
    form, shapes = FORMS["gate and up"]
    gate, up = full_tensors(shapes)
    assert torch.equal(form.shard([gate, up], 1, 2), torch.cat((gate[6:], up[6:])))


def test_the_heads_of_a_group_are_in_one_shard():
    """Megatron's order: for each group, its heads of q, its k, its v."""
    form, shapes = FORMS["qkv"]
    q, k, v = full_tensors(shapes)
    parts = [x for g in (2, 3) for x in (q[6 * g : 6 * g + 6], k[2 * g : 2 * g + 2],
                                         v[2 * g : 2 * g + 2])]  # fmt: skip
    assert torch.equal(form.shard([q, k, v], 1, 2), torch.cat(parts))
