"""Tiny random models of every trainable architecture, written by transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers

SIZES = {
    "vocab_size": 259,  # not a multiple of 2: shards are padded
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GLM = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.5, "norm_topk_prob": True,
}  # fmt: skip
LATENT = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
    "routed_scaling_factor": 1.5, "norm_topk_prob": True, "num_key_value_heads": 4,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "head_dim": 8,
    "rms_norm_eps": 1e-6,  # what its inner norms have, whatever the config says
}  # fmt: skip

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": PLAIN}),
    "llama_tied": ("Llama", {"rope_parameters": PLAIN, "tie_word_embeddings": True}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"rope_parameters": PLAIN, "sliding_window": None}),
    "qwen2": ("Qwen2", {"rope_parameters": PLAIN}),
    "qwen3": ("Qwen3", {"rope_parameters": PLAIN}),
    "qwen3_moe": ("Qwen3Moe", {"rope_parameters": PLAIN, **EXPERTS, "norm_topk_prob": True}),
    "mixtral": (
        "Mixtral",
        {"rope_parameters": PLAIN, "num_local_experts": 4, "sliding_window": None},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}, "use_qk_norm": True, **GLM},
    ),
    "deepseek_v3": ("DeepseekV3", {"rope_parameters": PLAIN, **LATENT}),
}


def write_model(kind: str, folder: Path, **changes: Any) -> Path:
    """A Hugging Face folder; the same weights whenever it is written."""
    name, extra = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **extra, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith("bias"):
                parameter += 0.1 * torch.randn_like(parameter)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer += 0.1 * torch.randn_like(buffer)
    model.save_pretrained(folder)
    return folder
