"""From a network and its layout to the arguments of Megatron-core and SGLang."""

from typing import Any

from tinkercloud.core.types import LoraSpec
from tinkercloud.planning.memory_estimate import last_stage_layers, padded_vocab
from tinkercloud.planning.model_shape import Experts, ModelShape
from tinkercloud.planning.plan import (
    ClusterShape,
    Dtype,
    Layout,
    MegatronArguments,
    PlanConstraints,
    RolloutLayout,
    SglangArguments,
)

ADAPTER_SLOTS = 8  # adapters an engine holds on the GPU; others wait in host memory
CONCURRENCY = 4  # requests admitted for each that would fit at full length
MAX_REQUESTS = 256
_ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP_MODULES = ("gate_proj", "up_proj", "down_proj")
_LORA_MODULES = (*_ATTENTION_MODULES, *_MLP_MODULES, "lm_head")


def megatron_arguments(
    shape: ModelShape, layout: Layout, max_seq_len: int, dtype: Dtype
) -> MegatronArguments:
    full = layout.recompute == "full"
    last = last_stage_layers(shape.layers, layout.pp)
    return MegatronArguments(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.v_head_dim,
        layernorm_epsilon=shape.norm_eps,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm or shape.latent is not None,
        vocab_size=shape.vocab_size,
        dtype=dtype,
        padded_vocab_size=padded_vocab(shape, layout.tp),
        max_sequence_length=max_seq_len,
        untie_embeddings_and_output_weights=not shape.tied,
        rotary_base=shape.rope.base,
        rotary_percent=shape.rope.percent,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.sequence_parallel,
        num_layers_in_last_pipeline_stage=last if shape.layers % layout.pp else None,
        recompute_granularity="full" if full else None,
        recompute_method="uniform" if full else None,
        recompute_num_layers=1 if full else None,
        **_rope(shape),
        **_latent(shape),
        **(_experts(shape, shape.experts) if shape.experts else {}),
    )


def _rope(shape: ModelShape) -> dict[str, Any]:
    rope = shape.rope
    if shape.latent or rope.kind == "default":
        return {}
    if rope.kind == "linear":
        return {"seq_len_interpolation_factor": rope.factor}
    assert rope.kind == "llama3", "refused by model_table.untrainable"
    return {"rope_scaling": True, "rope_scaling_factor": rope.factor}


def _latent(shape: ModelShape) -> dict[str, Any]:
    latent, rope = shape.latent, shape.rope
    if latent is None:
        return {}
    arguments: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_head_dim": latent.qk_nope_head_dim,
        "qk_pos_emb_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
        "rope_type": "yarn" if rope.kind == "yarn" else "rope",
    }
    if rope.kind != "yarn":
        return arguments
    return arguments | {
        "rotary_scaling_factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
    }


def _experts(shape: ModelShape, experts: Experts) -> dict[str, Any]:
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_router_topk": experts.top_k,
        "moe_router_score_function": experts.score,
        "moe_router_pre_softmax": experts.pre_softmax,
        "moe_router_topk_scaling_factor": experts.scaling_factor,
        "moe_router_num_groups": experts.groups,
        "moe_router_group_topk": experts.group_top_k,
        "moe_router_enable_expert_bias": experts.score_correction,
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": experts.shared_ffn or None,
        "moe_layer_freq": tuple(int(kind) for kind in shape.expert_layers),
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
    }


def serves_adapters(shape: ModelShape) -> bool:
    """Whether engines take adapters as they are; networks with experts get merged weights."""
    return shape.experts is None and shape.latent is None


def sglang_arguments(
    shape: ModelShape,
    cluster: ClusterShape,
    rollout: RolloutLayout,
    max_seq_len: int,
    constraints: PlanConstraints,
) -> SglangArguments:
    adapters = constraints.lora_rank is not None and serves_adapters(shape)
    requests = max(1, CONCURRENCY * rollout.kv_tokens // max_seq_len)
    return SglangArguments(
        tp_size=rollout.tp,
        nnodes=-(-rollout.tp // cluster.gpus_per_node),
        mem_fraction_static=rollout.mem_fraction_static,
        context_length=max_seq_len,
        max_running_requests=min(MAX_REQUESTS, requests),
        enable_memory_saver=rollout.colocated,
        # Weights that come anew after every step need no copy; those under adapters do.
        enable_weights_cpu_backup=rollout.colocated and adapters,
        enable_lora=adapters,
        max_lora_rank=constraints.lora_rank if adapters else None,
        max_loras_per_batch=ADAPTER_SLOTS if adapters else None,
        dtype=constraints.dtype,
        lora_target_modules=_LORA_MODULES if adapters else (),
    )


def serves_adapter(engine: SglangArguments, spec: LoraSpec) -> bool:
    """Whether such an engine can serve the adapter alongside others; else it gets its weights
    merged."""
    modules = {"lm_head"} if spec.train_unembed else set[str]()
    modules |= set(_ATTENTION_MODULES) if spec.train_attn else set()
    modules |= set(_MLP_MODULES) if spec.train_mlp else set()
    return (
        engine.enable_lora
        and 0 < spec.rank <= (engine.max_lora_rank or 0)
        and modules <= set(engine.lora_target_modules)
    )
