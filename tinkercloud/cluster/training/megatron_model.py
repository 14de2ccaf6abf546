"""A Megatron-core network on this rank, from typed arguments.

One model chunk per rank (no virtual pipeline), not wrapped in DDP: `rank_optimizer` does that for
the parameters that are trained.
"""

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch

from tinkercloud.errors import ConfigError
from tinkercloud.planning.plan import MegatronArguments

logger = logging.getLogger(__name__)

_SEED = 1  # of Megatron's random state; no dropout and no initialisation draws from it


@dataclass(frozen=True, slots=True)
class RankHooks:
    """What depends on the kind of machine. layer_spec: of the decoder block, from its
    TransformerConfig; None: Transformer Engine's."""

    device: Literal["cuda", "cpu"] = "cuda"
    backend: Literal["nccl", "gloo"] = "nccl"
    layer_spec: Callable[[Any], Any] | None = None


def load_hooks(prepare: str | None) -> RankHooks:
    """The result of "module:function", called before Megatron is imported; None: a CUDA rank."""
    if prepare is None:
        return RankHooks()
    module, _, function = prepare.partition(":")
    return getattr(importlib.import_module(module), function)()


def initialize(  # noqa: PLR0913 - one call at the start of a process
    arguments: MegatronArguments,
    rank: int,
    world_size: int,
    init_method: str,
    hooks: RankHooks,
    timeout_s: float,
) -> None:
    """Join the process group and divide it into Megatron's groups. Collective over all ranks."""
    from megatron.core import parallel_state, tensor_parallel

    if hooks.device == "cuda":
        torch.cuda.set_device(0)  # Ray sets CUDA_VISIBLE_DEVICES to the actor's GPU
    timeout = timedelta(seconds=timeout_s)
    torch.distributed.init_process_group(
        hooks.backend, init_method, timeout, world_size=world_size, rank=rank
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=arguments.tensor_model_parallel_size,
        pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
        context_parallel_size=arguments.context_parallel_size,
        expert_model_parallel_size=arguments.expert_model_parallel_size,
        expert_tensor_parallel_size=arguments.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        create_gloo_process_groups=True,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(_SEED)


def build_model(arguments: MegatronArguments, hooks: RankHooks) -> Any:
    """This rank's GPTModel, with weights uninitialised (`conversion.load_base` sets every one)."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    config = transformer_config(arguments, hooks)
    rotary_base: Any = arguments.rotary_base  # annotated as an int; Megatron computes with floats
    model = GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(config, hooks),
        vocab_size=arguments.padded_vocab_size,
        max_sequence_length=arguments.max_sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=not arguments.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_percent=arguments.rotary_percent,
        rotary_base=rotary_base,
        rope_scaling=arguments.rope_scaling,
        rope_scaling_factor=arguments.rope_scaling_factor,
        seq_len_interpolation_factor=arguments.seq_len_interpolation_factor,
    )
    _mark_shards(model)
    return model.to(hooks.device)


def _mark_shards(model: Any) -> None:
    """Mark sharded parameters. Megatron does so while it initialises them, which we skip.

    A gradient norm counts an unmarked parameter on the first tensor-parallel rank only
    (`param_is_not_tensor_parallel_duplicate`).
    """
    from megatron.core.tensor_parallel import layers

    axes = {
        layers.ColumnParallelLinear: 0,
        layers.VocabParallelEmbedding: 0,
        layers.RowParallelLinear: 1,
    }
    for module in model.modules():
        axis = next((axis for kind, axis in axes.items() if isinstance(module, kind)), None)
        if axis is None:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            is_sharded = name == "weight" or axis == 0
            if is_sharded and not hasattr(parameter, "tensor_model_parallel"):
                layers.set_tensor_model_parallel_attributes(parameter, True, axis, 1)


def torch_dtype(arguments: MegatronArguments) -> torch.dtype:
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[arguments.dtype]


def transformer_config(arguments: MegatronArguments, hooks: RankHooks) -> Any:
    """Megatron's TransformerConfig, or MLATransformerConfig for latent attention.

    No fusion that needs Apex or Transformer Engine's own kernels. No dropout. The router adds no
    auxiliary loss, drops no token and keeps its bias: only the user's loss is trained on.
    """
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    kind = MLATransformerConfig if arguments.multi_latent_attention else TransformerConfig
    dtype = torch_dtype(arguments)
    return kind(
        num_layers=arguments.num_layers,
        hidden_size=arguments.hidden_size,
        ffn_hidden_size=arguments.ffn_hidden_size,
        num_attention_heads=arguments.num_attention_heads,
        num_query_groups=arguments.num_query_groups,
        kv_channels=arguments.kv_channels,
        normalization="RMSNorm",
        layernorm_epsilon=arguments.layernorm_epsilon,
        add_bias_linear=False,
        add_qkv_bias=arguments.add_qkv_bias,
        qk_layernorm=arguments.qk_layernorm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=arguments.tensor_model_parallel_size,
        pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
        context_parallel_size=arguments.context_parallel_size,
        expert_model_parallel_size=arguments.expert_model_parallel_size,
        expert_tensor_parallel_size=arguments.expert_tensor_parallel_size,
        sequence_parallel=arguments.sequence_parallel,
        num_layers_in_last_pipeline_stage=arguments.num_layers_in_last_pipeline_stage,
        recompute_granularity=arguments.recompute_granularity,
        recompute_method=arguments.recompute_method,
        recompute_num_layers=arguments.recompute_num_layers,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type=arguments.moe_token_dispatcher_type,
        perform_initialization=False,
        use_cpu_initialization=hooks.device == "cpu",
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **_experts(arguments, hooks),
        **_latent(arguments),
    )


def _experts(arguments: MegatronArguments, hooks: RankHooks) -> dict[str, Any]:
    if not arguments.num_moe_experts:
        return {}
    frequency = arguments.moe_layer_freq
    return {
        "num_moe_experts": arguments.num_moe_experts,
        "moe_ffn_hidden_size": arguments.moe_ffn_hidden_size,
        "moe_router_topk": arguments.moe_router_topk,
        "moe_router_score_function": arguments.moe_router_score_function,
        "moe_router_pre_softmax": arguments.moe_router_pre_softmax,
        "moe_router_topk_scaling_factor": arguments.moe_router_topk_scaling_factor,
        "moe_router_num_groups": arguments.moe_router_num_groups,
        "moe_router_group_topk": arguments.moe_router_group_topk,
        "moe_router_enable_expert_bias": arguments.moe_router_enable_expert_bias,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": arguments.moe_router_dtype,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_shared_expert_intermediate_size": arguments.moe_shared_expert_intermediate_size,
        "moe_layer_freq": list(frequency) if frequency else 1,
        # Grouped GEMM is a CUDA kernel; on a CPU the experts are computed one by one.
        "moe_grouped_gemm": arguments.moe_grouped_gemm and hooks.device == "cuda",
        "moe_permute_fusion": False,
    }


_LATENT = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rope_type",
    "rotary_base",
    "rotary_percent",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)


def _latent(arguments: MegatronArguments) -> dict[str, Any]:
    if not arguments.multi_latent_attention:
        return {}
    values = {name: getattr(arguments, name) for name in _LATENT}
    fields = {name: value for name, value in values.items() if value is not None}
    return {"multi_latent_attention": True, "q_lora_rank": arguments.q_lora_rank, **fields}


def _layer_spec(config: Any, hooks: RankHooks) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs

    if hooks.layer_spec is not None:
        return hooks.layer_spec(config)
    if not gpt_layer_specs.HAVE_TE:
        # Megatron's local attention supports neither packed sequences nor context parallelism
        # (`DotProductAttention` asserts both).
        raise ConfigError(
            "training on GPUs needs Transformer Engine, which is not installed here: "
            "pip install --no-build-isolation 'transformer-engine[pytorch]'"
        )
    return gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=True, normalization="RMSNorm"
    )
