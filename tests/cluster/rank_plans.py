"""Plans for tiny models on a few ranks, written down by hand."""

import json
from pathlib import Path
from typing import Any

from tinkercloud.planning.plan import (
    ClusterShape,
    Layout,
    MegatronArguments,
    Plan,
    RolloutLayout,
    SglangArguments,
)

MICROBATCH_TOKENS = 48


def tiny_plan(  # noqa: PLR0913 - one keyword for each size of a layout
    folder: Path,
    *,
    lora_rank: int | None = 8,
    expert_lora_rank: int | None = None,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int = 1,
    dp: int = 1,
    recompute: bool = False,
    sequence_parallel: bool = True,
    dtype: str = "float32",
    tokens: int = MICROBATCH_TOKENS,
) -> Plan:
    """sequence_parallel: where there are tensor-parallel ranks."""
    config = json.loads((folder / "config.json").read_text())
    recomputed, split = "full" if recompute else "none", sequence_parallel and tp > 1
    layout = Layout(tp, pp, cp, ep, etp, dp, split, recomputed, tokens)
    return Plan(
        architecture=config["architectures"][0],
        parameters=0,
        active_parameters=0,
        trained_parameters=0,
        cluster=ClusterShape(layout.world),
        layout=layout,
        rollout=RolloutLayout(1, 1, True, 0.5, 0),
        lora_rank=lora_rank,
        expert_lora_rank=expert_lora_rank,
        max_seq_len=256,
        logits_chunk_tokens=16,
        distributed_optimizer=True,
        usable_bytes=0,
        phases=(),
        megatron=_megatron(config, layout, dtype),
        sglang=SglangArguments(
            1, 1, 0.5, 256, 1, enable_memory_saver=False, enable_weights_cpu_backup=False,
            enable_lora=False, max_lora_rank=None, max_loras_per_batch=None, lora_target_modules=(),
        ),
    )  # fmt: skip


def _megatron(config: dict[str, Any], layout: Layout, dtype: str) -> MegatronArguments:
    heads, vocab = config["num_attention_heads"], config["vocab_size"]
    experts: dict[str, Any] = {}
    if num_experts := config.get("num_experts") or config.get("num_local_experts"):
        experts = {
            "num_moe_experts": num_experts,
            "moe_ffn_hidden_size": config["moe_intermediate_size"],
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_layer_freq": (1,) * config["num_hidden_layers"],
        }
    recompute = layout.recompute == "full"
    return MegatronArguments(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config.get("head_dim") or config["hidden_size"] // heads,
        layernorm_epsilon=config["rms_norm_eps"],
        add_qkv_bias="Qwen2" in config["architectures"][0],
        qk_layernorm="Qwen3" in config["architectures"][0],
        vocab_size=vocab,
        padded_vocab_size=-(-vocab // (8 * layout.tp)) * 8 * layout.tp,
        max_sequence_length=config["max_position_embeddings"],
        untie_embeddings_and_output_weights=not config["tie_word_embeddings"],
        rotary_base=config.get("rope_parameters", config)["rope_theta"],
        dtype=dtype,  # type: ignore[arg-type]
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.sequence_parallel,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        **experts,
    )
