"""GGUF files of the Llama, Qwen2 and Qwen3 families, under Hugging Face names."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import log, prod
from typing import Any

import torch
from torch import Tensor

from tinkercloud.architectures.config import ArchitectureConfig, from_hf
from tinkercloud.errors import ConfigError
from tinkercloud.weights.gguf_file import GGUFFile

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FACTORS = "rope_freqs.weight"
_ELEMENTS_AT_ONCE = 1 << 22  # dequantised in float32 at a time


def gguf_config(file: GGUFFile) -> ArchitectureConfig:
    """Raises ConfigError for what is missing or not supported."""
    metadata, tensors = file.metadata, file.tensors
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise ConfigError(f"GGUF architecture {kind!r} is not supported: {', '.join(_CLASSES)} are")
    if "token_embd.weight" not in tensors:
        raise ConfigError(f"{file.path.name} has no token_embd.weight")
    fields = {
        key.removeprefix(f"{kind}."): value
        for key, value in metadata.items()
        if key.startswith(f"{kind}.")
    }
    try:
        raw = _as_hf(fields, metadata) | _head_sizes(fields)
    except KeyError as error:
        raise ConfigError(f"{file.path.name} has no {kind}.{error.args[0]}") from error
    except TypeError as error:
        raise ConfigError(f"{file.path.name}: metadata of the wrong kind: {error}") from error
    raw["architectures"] = [_CLASSES[kind]]
    raw["vocab_size"] = tensors["token_embd.weight"].shape[0]
    raw["tie_word_embeddings"] = "output.weight" not in tensors
    config = replace(
        from_hf(raw),
        attention_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
    )
    return _with_factors(file, config)


def hf_name(name: str) -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj`; biases keep their `.bias`."""
    stem, _, suffix = name.rpartition(".")
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in _BLOCK:
        stem = f"model.layers.{match[1]}.{_BLOCK[match[2]]}"
    elif stem in _TOP:
        stem = _TOP[stem]
    else:
        return None
    return {"weight": stem, "bias": f"{stem}.bias"}.get(suffix)


def gguf_shapes(file: GGUFFile) -> dict[str, tuple[int, ...]]:
    """What the file holds, by our names; tensors of unknown names under their fields."""
    return {
        hf_name(name) or name: entry.shape
        for name, entry in file.tensors.items()
        if name != _FACTORS
    }


def gguf_weights(
    file: GGUFFile, config: ArchitectureConfig, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """(our name, tensor on the CPU), one after the other."""
    for name in file.tensors:
        target = hf_name(name)
        if target is None:
            continue
        tensor = _dequantised(file, name, dtype)
        if config.model_type == "llama":
            tensor = _unpermuted(target, tensor, config)
        yield target, tensor


def _dequantised(file: GGUFFile, name: str, dtype: torch.dtype) -> Tensor:
    """Row by row in blocks, so that a large float32 copy never exists beside a small target."""
    shape = file.tensors[name].shape
    num_rows, width = prod(shape[:-1]), shape[-1]
    tensor = torch.empty((num_rows, width), dtype=dtype)
    step = max(1, _ELEMENTS_AT_ONCE // width)
    for start in range(0, num_rows, step):
        # A writable copy: some kinds come back as a view of the read-only file.
        rows = torch.from_numpy(file.rows(name, start, min(start + step, num_rows)).copy())
        tensor[start : start + step] = rows
    return tensor.view(shape)


def _unpermuted(name: str, tensor: Tensor, config: ArchitectureConfig) -> Tensor:
    """llama.cpp interleaves the two rotary halves of q and k in Llama files; put them apart."""
    if ".q_proj" in name:
        heads = config.num_heads
    elif ".k_proj" in name:
        heads = config.num_kv_heads
    else:
        return tensor
    pairs = tensor.unflatten(0, (heads, config.head_dim // 2, 2))
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _as_hf(fields: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    eos_keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    eos = [metadata.get(f"tokenizer.ggml.{key}") for key in eos_keys]
    context = fields["context_length"]
    if fields.get("expert_count", 0):
        raise ConfigError(
            f"{fields['expert_count']} experts: mixtures of experts are not supported"
        )
    if 0 < fields.get("attention.sliding_window", 0) < context:
        raise ConfigError("sliding-window attention is in use; only full attention is supported")
    return {
        "hidden_size": fields["embedding_length"],
        "intermediate_size": fields["feed_forward_length"],
        "num_hidden_layers": fields["block_count"],
        "rms_norm_eps": fields["attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": context,
        "rope_parameters": {"rope_theta": fields.get("rope.freq_base"), **_rope_scaling(fields)},
        "eos_token_id": list(dict.fromkeys(token for token in eos if token is not None)),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
    }


def _head_sizes(fields: Mapping[str, Any]) -> dict[str, Any]:
    heads = fields["attention.head_count"]
    kv_heads = fields.get("attention.head_count_kv", heads)
    if isinstance(heads, list) or isinstance(kv_heads, list):
        raise ConfigError("head counts that differ between layers are not supported")
    size = fields.get("attention.key_length", fields["embedding_length"] // max(heads, 1))
    rotated = fields.get("rope.dimension_count", size)
    if fields.get("attention.value_length", size) != size or rotated != size:
        raise ConfigError("value heads or rotary dimensions that differ from the key heads")
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size}


def _rope_scaling(fields: Mapping[str, Any]) -> dict[str, Any]:
    kind = fields.get("rope.scaling.type", "linear" if "rope.scale_linear" in fields else "none")
    factor = fields.get("rope.scaling.factor", fields.get("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return {}
    scaling = {"rope_type": kind, "factor": factor}
    if (original := fields.get("rope.scaling.original_context_length")) is not None:
        scaling["original_max_position_embeddings"] = original
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if fields.get(f"rope.scaling.{theirs}"):
            scaling[ours] = fields[f"rope.scaling.{theirs}"]
    extra = fields.get("rope.scaling.yarn_attn_factor", fields.get("rope.scaling.attn_factor"))
    if kind == "yarn" and extra:
        # llama.cpp multiplies this onto the paper's magnitude; Hugging Face replaces it.
        scaling["attention_factor"] = extra * (0.1 * log(factor) + 1.0 if factor > 1 else 1.0)
    return scaling


def _with_factors(file: GGUFFile, config: ArchitectureConfig) -> ArchitectureConfig:
    """Llama 3.1 files carry their scaling as one divisor per frequency."""
    if _FACTORS not in file.tensors:
        return config
    if config.rope_scaling is not None:
        raise ConfigError(f"{file.path.name} has both rope_freqs.weight and a rotary scaling")
    factors = tuple(file.rows(_FACTORS, 0, 1)[0].tolist())
    if len(factors) != config.head_dim // 2 or not all(factor > 0 for factor in factors):
        raise ConfigError(f"{file.path.name}: rope_freqs.weight does not fit the head size")
    return replace(config, rope_scaling={"rope_type": "factors", "factors": factors})
