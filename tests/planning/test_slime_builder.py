"""Plans: exact ones for public networks, and what every plan must satisfy."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from tests.planning.public_configs import TRAINABLE, public_config
from tinkercloud.core.types import LoraSpec
from tinkercloud.errors import PlanRefused
from tinkercloud.planning import memory_estimate as memory
from tinkercloud.planning.engine_arguments import serves_adapter
from tinkercloud.planning.model_table import read_shape
from tinkercloud.planning.plan import GIB, ClusterShape, Layout, Plan, PlanConstraints
from tinkercloud.planning.slime_builder import SlimeArgumentBuilder

TINY_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "vocab_size": 251,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
}
SIZES = ("tp", "pp", "cp", "ep", "etp", "dp", "recompute", "microbatch_tokens")


def build(name: str, gpus: int, **constraints) -> Plan:
    return SlimeArgumentBuilder(ClusterShape(gpus)).build(
        public_config(name), PlanConstraints(**constraints)
    )


def tiny(gpus: int, **constraints) -> Plan:
    shape = ClusterShape(gpus, gpu_memory_bytes=8 * GIB)
    plan_constraints = PlanConstraints(
        **{"dtype": "float32", "max_seq_len": 64, "lora_rank": 8} | constraints
    )
    return SlimeArgumentBuilder(shape).build(TINY_MOE, plan_constraints)


@cache
def every_plan(name: str) -> list[Plan]:
    plans = []
    for gpus, (rank, seq_len) in product((1, 2, 8, 24, 64, 512), ((None, 4096), (64, 2048))):
        try:
            plans.append(build(name, gpus, lora_rank=rank, max_seq_len=seq_len))
        except PlanRefused as refused:
            assert refused.reasons
    assert plans, "no plan at all to be checked"
    return plans


# name, GPUs, LoRA rank: (tp, pp, cp, ep, dp), recompute, (engines, tp of each)
SNAPSHOTS = {
    ("Qwen2.5-0.5B", 1, 32): ((1, 1, 1, 1, 1), "none", (1, 1)),
    ("Llama-3.2-1B", 1, None): ((1, 1, 1, 1, 1), "none", (1, 1)),
    ("Llama-2-7B", 8, 32): ((1, 1, 1, 1, 8), "none", (8, 1)),
    ("Llama-3.1-8B", 1, 32): ((1, 1, 1, 1, 1), "none", (1, 1)),
    ("Llama-3.1-8B", 8, None): ((2, 1, 1, 1, 4), "none", (8, 1)),
    ("Mistral-7B-v0.3", 8, 32): ((1, 1, 1, 1, 8), "none", (8, 1)),
    ("Qwen3-32B", 8, 32): ((4, 1, 1, 1, 2), "none", (4, 2)),
    ("Qwen3-32B", 16, None): ((8, 1, 1, 1, 2), "none", (8, 2)),
    ("Llama-3.1-70B", 8, 32): ((8, 1, 1, 1, 1), "none", (2, 4)),
    ("Llama-3.1-70B", 64, None): ((8, 2, 1, 1, 4), "none", (16, 4)),
    ("Mixtral-8x7B", 8, 32): ((2, 1, 1, 4, 4), "none", (4, 2)),
    ("Qwen3-30B-A3B", 8, 32): ((2, 1, 1, 2, 4), "none", (4, 2)),
    ("GLM-4.5-Air", 16, 32): ((4, 2, 1, 8, 2), "none", (4, 4)),
    ("Qwen3-235B-A22B", 64, 32): ((4, 4, 2, 8, 2), "none", (8, 8)),
    ("Qwen3-235B-A22B", 64, None): ((4, 2, 1, 32, 8), "full", (8, 8)),
    ("DeepSeek-V3", 64, 32): ((8, 2, 1, 32, 4), "none", (2, 32)),
    ("DeepSeek-V3", 512, None): ((8, 1, 2, 256, 32), "none", (16, 32)),
}


@pytest.mark.parametrize(("name", "gpus", "rank"), SNAPSHOTS)
def test_the_plan_of_a_public_network_is_the_known_one(name, gpus, rank):
    plan = build(name, gpus, lora_rank=rank)
    lay = plan.layout
    sizes = (lay.tp, lay.pp, lay.cp, lay.ep, lay.dp)
    engines = (plan.rollout.engines, plan.rollout.tp)
    assert (sizes, lay.recompute, engines) == SNAPSHOTS[name, gpus, rank]


@pytest.mark.parametrize("name", TRAINABLE)
def test_every_plan_fits_in_memory_in_every_phase(name):
    for plan in every_plan(name):
        for phase in plan.phases:
            assert 0 < phase.total <= plan.usable_bytes < plan.cluster.gpu_memory_bytes


def _divides(plan: Plan) -> bool:
    lay, megatron = plan.layout, plan.megatron
    checks = [
        megatron.num_attention_heads % lay.tp == 0,
        megatron.multi_latent_attention or megatron.num_query_groups % lay.tp == 0,
        megatron.padded_vocab_size % lay.tp == 0,
        megatron.padded_vocab_size >= megatron.vocab_size,
        plan.cluster.gpus_per_node % lay.tp == 0 or plan.cluster.gpus <= lay.tp,
        lay.microbatch_tokens % (lay.tp * (2 * lay.cp if lay.cp > 1 else 1)) == 0,
        lay.microbatch_tokens >= plan.max_seq_len,
        megatron.num_layers >= lay.pp,
    ]
    if megatron.num_moe_experts:
        checks += [
            megatron.num_moe_experts % lay.ep == 0,
            (lay.tp * lay.cp * lay.dp) % (lay.ep * lay.etp) == 0,
            lay.tp == 1 or lay.sequence_parallel,
            len(megatron.moe_layer_freq) == megatron.num_layers,
        ]
    else:
        checks += [lay.ep == lay.etp == 1, megatron.ffn_hidden_size % lay.tp == 0]
    return all(checks)


@pytest.mark.parametrize("name", TRAINABLE)
def test_every_plan_divides_and_uses_every_gpu_once(name):
    for plan in every_plan(name):
        assert _divides(plan), plan.layout
        assert plan.layout.world == plan.cluster.gpus  # those in use
        assert plan.rollout.engines * plan.rollout.tp == plan.cluster.gpus


@pytest.mark.parametrize("name", TRAINABLE)
def test_stages_hold_every_layer_once(name):
    shape = read_shape(public_config(name))
    for plan in every_plan(name):
        held = memory.stages(shape, plan.layout.pp)
        assert sum(stage.dense + stage.experts for stage in held) == shape.layers
        assert all(stage.dense + stage.experts > 0 for stage in held)
        last = plan.megatron.num_layers_in_last_pipeline_stage
        assert last in (None, held[-1].dense + held[-1].experts)


@pytest.mark.parametrize("name", TRAINABLE)
@pytest.mark.parametrize("rank", [None, 32])
def test_twice_the_gpus_never_make_it_refuse(name, rank):
    possible = False
    for gpus in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        try:
            build(name, gpus, lora_rank=rank)
            possible = True
        except PlanRefused as refused:
            assert not possible, (gpus, refused.reasons)
    assert possible


@pytest.mark.parametrize("rank", [None, 32])
@pytest.mark.parametrize("name", ["Llama-3.1-70B", "Qwen3-30B-A3B", "Qwen3-235B-A22B"])
def test_one_more_node_never_makes_it_refuse(name, rank):
    possible = False
    for nodes in range(1, 13):
        try:
            build(name, 8 * nodes, lora_rank=rank)
            possible = True
        except PlanRefused as refused:
            assert not possible, (nodes, refused.reasons)


def test_a_node_that_divides_badly_is_left_idle_and_the_plan_says_so():
    plan = build("Qwen3-235B-A22B", 24)
    assert plan.cluster.gpus == plan.layout.world == 16
    assert plan.reasons[-1].startswith("8 of 24 GPUs idle")


def test_every_small_constraint_is_kept_or_refused_by_its_name():
    kept = 0
    for tp, pp, cp, ep in product((1, 2, 3, 4), (1, 2, 4, 5), (1, 2, 3), (1, 2, 3, 4)):
        sizes = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
        try:
            layout = tiny(8, **sizes).layout
        except PlanRefused as refused:
            reasons = "; ".join(refused.reasons)
            assert any(f"{name} {size}" in reasons for name, size in sizes.items()), (
                sizes,
                reasons,
            )
        else:
            assert {name: getattr(layout, name) for name in sizes} == sizes
            kept += 1
    assert kept > 20


@pytest.mark.parametrize(
    "constraints",
    [
        {"recompute": "full"},
        {"recompute": "none"},
        {"microbatch_tokens": 128},
        {"dp": 2},
        {"etp": 2, "tp": 2},
        {"cp": 2, "max_seq_len": 8},
        {"sequence_parallel": True, "tp": 2},
    ],
)
def test_a_constraint_is_kept(constraints):
    layout = tiny(4, **constraints).layout
    sizes = {name: value for name, value in constraints.items() if name != "max_seq_len"}
    assert {name: getattr(layout, name) for name in sizes} == sizes


@pytest.mark.parametrize(
    ("constraints", "reason"),
    [
        ({"tp": 4}, "tp 4 does not divide 2 (key/value heads)"),
        ({"tp": 3}, "tp 3 does not divide 4 (attention heads)"),
        ({"pp": 8}, "pp 8"),
        ({"ep": 3}, "ep 3 does not divide 4 experts"),
        ({"dp": 3}, "dp 3"),
        ({"microbatch_tokens": 32}, "micro-batches of 32 tokens cannot hold a sequence of 64"),
        ({"cp": 4, "tp": 2, "microbatch_tokens": 72}, "micro-batches of 72 tokens do not divide"),
        ({"tp": 2, "sequence_parallel": False}, "need sequence parallelism"),
        ({"sequence_parallel": True, "tp": 1}, "sequence parallelism needs tp above 1"),
        ({"rollout_tp": 3}, "engines of 3 GPUs"),
        ({"max_seq_len": 1024}, "the network knows 512 positions"),
        ({"tp": 0}, "tp must be at least 1"),
        ({"lora_rank": 0}, "LoRA rank must be at least 1"),
        ({"rollout_gpus": 8}, "8 of 8 GPUs cannot be set aside"),
    ],
)
def test_an_impossible_constraint_is_refused_with_its_reason(constraints, reason):
    with pytest.raises(PlanRefused) as refused:
        tiny(8, **constraints)
    assert reason in "; ".join(refused.value.reasons)


def test_experts_are_refused_where_there_are_none():
    with pytest.raises(PlanRefused, match="LlamaForCausalLM has no experts"):
        build("Llama-3.1-8B", 8, ep=2)


@pytest.mark.parametrize("shape", [ClusterShape(0), ClusterShape(10), ClusterShape(10**6)])
def test_a_cluster_that_cannot_be_is_refused(shape):
    with pytest.raises(PlanRefused, match=r"(?i)gpus"):
        SlimeArgumentBuilder(shape).build(TINY_MOE)


def test_all_obstacles_are_named_at_once():
    with pytest.raises(PlanRefused) as refused:
        build("gemma-3-1b", 8, max_seq_len=10**6)
    reasons = "; ".join(refused.value.reasons)
    assert all(part in reasons for part in ("cannot be trained", "sliding window", "positions"))


def test_a_model_too_large_is_refused_with_the_number_of_gpus_that_would_do():
    with pytest.raises(PlanRefused) as refused:
        build("Llama-3.1-70B", 8, lora_rank=None)
    reasons = refused.value.reasons
    assert reasons[0].startswith("training needs ")
    needed = int(reasons[-1].split()[0])
    assert build("Llama-3.1-70B", needed, lora_rank=None).layout.world == needed
    with pytest.raises(PlanRefused):
        build("Llama-3.1-70B", needed // 2, lora_rank=None)


def test_the_same_question_has_the_same_answer():
    first = build("Qwen3-235B-A22B", 64)
    assert first == build("Qwen3-235B-A22B", 64)
    assert first.to_json() == build("Qwen3-235B-A22B", 64).to_json()


def test_every_decision_has_a_reason():
    plan = build("Qwen3-235B-A22B", 64)
    for subject in ("tp 4:", "pp 4:", "cp 2:", "ep 8:", "etp 1:", "dp 2:", "recompute none:"):
        assert any(reason.startswith(subject) for reason in plan.reasons), subject


def test_a_constraint_is_reported_as_asked_for():
    reasons = build("Llama-3.1-8B", 8, tp=4, recompute="full").reasons
    assert "tp 4: as asked for" in reasons
    assert "recompute full: as asked for" in reasons


def test_gpus_set_aside_sample_and_the_others_train():
    plan = build("Llama-3.1-8B", 16, rollout_gpus=8)
    assert plan.layout.world == 8
    assert plan.rollout.engines * plan.rollout.tp == 8
    assert not plan.rollout.colocated
    assert not plan.sglang.enable_memory_saver


def test_uneven_stages_reach_megatron():
    plan = build("DeepSeek-V3", 64, pp=4)
    assert plan.megatron.num_layers_in_last_pipeline_stage == 61 - 3 * 16


def test_the_vocabulary_is_padded_to_the_tensor_parallel_size_only():
    assert tiny(2, tp=2).megatron.padded_vocab_size == 252
    assert tiny(2, tp=1).megatron.padded_vocab_size == 251


def test_engines_without_experts_take_adapters_others_merged_weights():
    assert build("Llama-3.1-8B", 8).sglang.max_lora_rank == 32
    assert not build("Qwen3-30B-A3B", 8).sglang.enable_lora
    assert not build("Llama-3.1-8B", 8, lora_rank=None).sglang.enable_lora


def test_an_engine_serves_the_adapters_that_its_options_have_room_for():
    engine = build("Llama-3.1-8B", 8, lora_rank=16).sglang
    attention = LoraSpec(rank=4, seed=0, train_mlp=False, train_unembed=False)
    assert serves_adapter(engine, LoraSpec(rank=16, seed=0))
    assert not serves_adapter(engine, LoraSpec(rank=17, seed=0))
    assert not serves_adapter(engine, LoraSpec(rank=0, seed=0))
    fewer = replace(engine, lora_target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
    assert serves_adapter(fewer, attention)
    assert not serves_adapter(fewer, LoraSpec(rank=4, seed=0))
    assert not serves_adapter(build("Llama-3.1-8B", 8, lora_rank=None).sglang, attention)


def test_llama3_scaling_and_latent_attention_reach_megatron():
    llama = build("Llama-3.2-1B", 1).megatron
    assert (llama.rope_scaling, llama.rope_scaling_factor) == (True, 32.0)
    deepseek = build("DeepSeek-V3", 64).megatron
    assert deepseek.multi_latent_attention
    assert (deepseek.rope_type, deepseek.rotary_scaling_factor) == ("yarn", 40.0)
    assert (deepseek.moe_router_num_groups, deepseek.moe_router_group_topk) == (8, 4)


def test_adapters_count_as_trained_and_full_training_as_all():
    # q and o: 4096 + 4096, k and v: 4096 + 1024, three of the MLP: 4096 + 14336; the output layer.
    layer = 2 * 8192 + 2 * 5120 + 3 * 18432
    assert build("Llama-3.1-8B", 8, lora_rank=16).trained_parameters == 16 * (
        32 * layer + 4096 + 128256
    )
    assert build("Llama-3.1-8B", 8, lora_rank=None).trained_parameters == 8_030_261_248


def test_a_layout_knows_its_ranks():
    layout = Layout(2, 2, 2, 4, 1, 4, True, "none", 64)
    assert (layout.world, layout.expert_dp) == (32, 4)
    assert replace(layout, ep=16).expert_dp == 1
