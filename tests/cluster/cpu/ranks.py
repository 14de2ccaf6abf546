"""What makes a process a rank without a GPU (the setting `cluster.prepare`)."""

import os
import warnings
from typing import Any

import torch


def prepare() -> Any:
    """RankHooks for a CPU. One thread, so that ranks on few cores do not wait for each other."""
    torch.set_num_threads(1)
    # Megatron hands small functions to the compiler when it is imported; nothing here calls them
    # often enough to pay for that.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    warnings.filterwarnings("ignore")  # what Megatron says of a machine without Apex and TE
    from tests.cluster.cpu import megatron_shim
    from tinkercloud.cluster.training.megatron_model import RankHooks

    megatron_shim.install()
    return RankHooks(device="cpu", backend="gloo", layer_spec=layer_spec)


def layer_spec(config: Any) -> Any:
    """Megatron's local block with an attention that knows packed sequences and context ranks."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from tests.cluster.cpu.attention import CpuAttention, CpuRMSNorm

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    spec.layer_norm = CpuRMSNorm
    for layer in spec.layer_specs:
        parts = layer.submodules
        attention = parts.self_attention.submodules
        attention.core_attention = CpuAttention
        parts.input_layernorm = parts.pre_mlp_layernorm = CpuRMSNorm
        if config.multi_latent_attention:
            attention.kv_layernorm = CpuRMSNorm
            if config.q_lora_rank is not None:
                attention.q_layernorm = CpuRMSNorm
        elif config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = CpuRMSNorm
    return spec
