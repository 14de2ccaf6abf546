"""Starting an installed Miles: its arguments from our plan, its trainer without its engines.

All names from Miles' sources are in this file's tables. Written for the Tinker gateway of
radixark/miles (`serve_tinker.py`); a version that lacks a name is refused with that name.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from tinkercloud.cluster.training.rank_types import RankSettings
from tinkercloud.config import ClusterConfig
from tinkercloud.core.types import LORA_ALPHA
from tinkercloud.errors import ConfigError
from tinkercloud.planning.plan import MegatronArguments, Plan

INSTALL = (
    "cluster.trainer is miles, but Miles is not installed: it is not on the package index; follow "
    "https://github.com/radixark/miles, or set cluster.trainer to megatron"
)

PARTS = {  # what is taken from Miles, in serve_tinker's order
    "parse_args": "miles.utils.arguments:parse_args",
    "add_tinker_arguments": "miles.tinker.arguments:add_tinker_arguments",
    "configure_tinker_args": "miles.tinker.arguments:configure_tinker_args",
    "Disposer": "miles.utils.async_utils:Disposer",
    "init_orchestration_script": "miles.utils.orchestration_utils:init_orchestration_script",
    "compute_trainer_configs": "miles.ray.specs.train:compute_trainer_configs",
    "ACTOR_ROLE": "miles.ray.specs.train:ACTOR_ROLE",
    "create_trainer_handles": "miles.ray.placement_group:create_trainer_handles",
    "compute_trainer_args": "miles.backends.megatron_utils.megatron_config:compute_trainer_args",
    "MilesBackend": "miles.tinker.runtime:MilesBackend",
}

FIELDS = {  # MegatronArguments -> Miles' (Megatron-LM's) option
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "ffn_hidden_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "num_query_groups": "--num-query-groups",
    "kv_channels": "--kv-channels",
    "layernorm_epsilon": "--norm-epsilon",
    "vocab_size": "--vocab-size",
    "max_sequence_length": "--max-position-embeddings",
    "rotary_base": "--rotary-base",
    "rotary_percent": "--rotary-percent",
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "context_parallel_size": "--context-parallel-size",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size",
    "recompute_granularity": "--recompute-granularity",
    "recompute_method": "--recompute-method",
    "recompute_num_layers": "--recompute-num-layers",
    "num_moe_experts": "--num-experts",
    "moe_ffn_hidden_size": "--moe-ffn-hidden-size",
    "moe_shared_expert_intermediate_size": "--moe-shared-expert-intermediate-size",
    "moe_router_topk_scaling_factor": "--moe-router-topk-scaling-factor",
    "moe_router_dtype": "--moe-router-dtype",
}
EXPERT_FIELDS = {  # meaningless without experts
    "moe_router_topk": "--moe-router-topk",
    "moe_router_score_function": "--moe-router-score-function",
    "moe_token_dispatcher_type": "--moe-token-dispatcher-type",
}
SWITCHES = {
    "add_qkv_bias": "--add-qkv-bias",
    "qk_layernorm": "--qk-layernorm",
    "untie_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
    "sequence_parallel": "--sequence-parallel",
    "rope_scaling": "--use-rope-scaling",
    "moe_router_pre_softmax": "--moe-router-pre-softmax",
    "moe_grouped_gemm": "--moe-grouped-gemm",
}
ALWAYS = (
    *("--swiglu", "--disable-bias-linear", "--group-query-attention"),
    *("--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    *("--attention-dropout", "0.0", "--hidden-dropout", "0.0", "--lora-dropout", "0.0"),
    *("--accumulate-allreduce-grads-in-fp32", "--attention-softmax-in-fp32"),
    *("--no-gradient-accumulation-fusion", "--use-dynamic-batch-size"),
    *("--megatron-to-hf-mode", "bridge"),
    *("--optimizer", "adam", "--lr", "1e-4"),  # every step brings its own
    "--debug-train-only",  # without its engines: sampling is ours
)


def check_miles(config: ClusterConfig) -> None:
    """Raises ConfigError where Miles is not installed or no GPU is left for sampling. Does not
    import Miles."""
    if find_spec("miles") is None:
        raise ConfigError(INSTALL)
    if not config.rollout_gpus:
        raise ConfigError("cluster.trainer miles needs sampling GPUs: cluster.rollout_gpus")


def miles_arguments(settings: RankSettings) -> list[str]:
    """Miles' command line for this plan. Raises ConfigError for what it has no options for."""
    plan, megatron = settings.plan, settings.plan.megatron
    if megatron.multi_latent_attention:
        raise ConfigError("the Miles adapter has no arguments for latent attention")
    if megatron.moe_layer_freq and not all(megatron.moe_layer_freq):
        raise ConfigError("the Miles adapter has no arguments for layers without experts")
    words = [*ALWAYS, *_of_network(megatron), *_of_run(settings, plan)]
    words += ["--bf16"] if megatron.dtype == "bfloat16" else []
    return words


def _of_network(megatron: MegatronArguments) -> list[str]:
    fields = FIELDS | (EXPERT_FIELDS if megatron.num_moe_experts else {})
    words: list[str] = []
    for name, option in fields.items():
        value = getattr(megatron, name)
        if value is not None:
            words += [option, str(value)]
    return words + [option for name, option in SWITCHES.items() if getattr(megatron, name)]


def _of_run(settings: RankSettings, plan: Plan) -> list[str]:
    per_node = min(plan.layout.world, plan.cluster.gpus_per_node)
    options = {
        "--hf-checkpoint": settings.folder,
        "--load": settings.folder,  # the gateway requires the base that the engines load
        "--lora-rank": plan.lora_rank,
        "--lora-alpha": LORA_ALPHA,
        "--multi-lora-n-adapters": settings.resident_adapters,
        "--max-tokens-per-gpu": plan.layout.microbatch_tokens,
        "--actor-num-nodes": max(1, plan.layout.world // per_node),
        "--actor-num-gpus-per-node": per_node,
    }
    return [word for option, value in options.items() for word in (option, str(value))]


async def start_executor(settings: RankSettings) -> Any:
    """Miles' `MilesBackend` over a trainer of its own, on Ray GPUs that it takes itself.

    Raises ConfigError when Miles is not installed, or lacks a name that is used here.
    """
    parts = {name: _part(target) for name, target in PARTS.items()}
    # Miles and Megatron-LM parse the process's command line; this process does nothing else.
    sys.argv = ["miles", *miles_arguments(settings)]
    args = parts["parse_args"](
        parts["add_tinker_arguments"],
        entry="serve",
        preprocess_args=parts["configure_tinker_args"],
    )
    # Each call brings one batch, and its size is the size of the global batch.
    args.use_dynamic_global_batch_size = True
    args.delay_split_train_data_by_dp = True
    parts["init_orchestration_script"](args, disposer=parts["Disposer"]())
    configs = parts["compute_trainer_configs"](args)
    [actor] = [config for config in configs if config.role == parts["ACTOR_ROLE"]]
    trainer = parts["create_trainer_handles"](args, trainer_configs=configs)[actor.trainer_id]
    await trainer.init(parts["compute_trainer_args"](args, actor))
    return parts["MilesBackend"](trainer, "", dp_size=settings.plan.layout.dp)


def _part(target: str) -> Any:
    module, _, name = target.partition(":")
    try:
        import_module("miles")
    except ImportError as error:
        raise ConfigError(INSTALL) from error
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"this Miles has no {target}; the adapter was written for one whose serve_tinker.py "
            f"imports it ({error})"
        ) from error
