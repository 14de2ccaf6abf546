"""What makes a process a rank without a GPU (in the place of the setting `cluster.prepare`)."""

import warnings
from typing import Any

import torch

from tinkercloud.cluster.cpu.presence import refuse_cuda
from tinkercloud.config import disable_torch_compiler


def prepare() -> Any:
    """RankHooks for a CPU. One thread, so that ranks on few cores do not wait for each other."""
    refuse_cuda()
    torch.set_num_threads(1)
    # Megatron hands small functions to the compiler when it is imported; nothing here calls them
    # often enough to pay for that.
    disable_torch_compiler()
    warnings.filterwarnings("ignore")  # what Megatron says of a machine without Apex and TE
    from tinkercloud.cluster.cpu import megatron_shim
    from tinkercloud.cluster.training.megatron_model import RankHooks

    megatron_shim.install()
    return RankHooks(device="cpu", backend="gloo", layer_spec=layer_spec)


def layer_spec(config: Any) -> Any:
    """Megatron's local block with an attention that knows packed sequences and context ranks."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from tinkercloud.cluster.cpu.attention import CpuAttention, CpuRMSNorm

    spec: Any = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm"
    )
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
