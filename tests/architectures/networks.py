"""Tiny random networks of each family, a plain way to run ours, and a writer of GGUF files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from torch import Tensor

from tests.architectures.loaded_model import LoadedModel
from tinkercloud.architectures import load_architecture
from tinkercloud.architectures.blocks import Scoring
from tinkercloud.architectures.layers import attend

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
FAMILIES = (
    *("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Olmo2", "Granite", "Ernie4_5"),
)
GGUF_FAMILIES = ("Llama", "Qwen2", "Qwen3")


SWITCHES: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 9},
    "Ministral": {"sliding_window": 9, "head_dim": 16},
    "Gemma2": {
        "head_dim": 16,
        "sliding_window": 9,
        "query_pre_attn_scalar": 24,
        "attn_implementation": "eager",  # the other one leaves out the cap
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0,
    },
    "Gemma3": {
        "head_dim": 16,
        "sliding_window": 9,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "Ernie4_5": {"use_bias": True, "head_dim": 16},
    "Granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.1,
        "logits_scaling": 0.5,
        "attention_bias": True,
        "mlp_bias": True,
    },
}
"""So that each shows in networks this small."""


class PackedContext:
    """The obvious Context: F.linear, and causal attention of one sequence after the other."""

    def __init__(self, weights: Mapping[str, Tensor], lengths: list[int]):
        self.weights, self.lengths = weights, lengths

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[name], self.weights.get(f"{name}.bias"))

    def embed(self, tokens: Tensor) -> Tensor:
        return self.weights["model.embed_tokens"][tokens]

    def norm_weight(self, name: str) -> Tensor:
        return self.weights[name]

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        parts = zip(*(x.split(self.lengths) for x in (q, k, v)), strict=True)
        return torch.cat([attend(*part, scoring) for part in parts])


def random_network(family: str, **overrides: Any) -> transformers.PreTrainedModel:
    """A Hugging Face model with weights large enough that every part shows in the logits."""
    name = {"Gemma3": "Gemma3Text"}.get(family, family)
    changes = SWITCHES.get(family, {}) | overrides
    config = getattr(transformers, f"{name}Config")(**SIZES | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # One is the natural scale of a norm, which Gemma adds; 1 / sqrt(in) that of a matrix.
            scale = 1.3 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.copy_(noise * scale + ("norm" in name and not family.startswith("Gemma")))
    return model


@torch.no_grad()
def our_logits(model: LoadedModel, sequences: list[Tensor], start: int = 0) -> Tensor:
    """Logits of the packed sequences, each beginning at position `start`."""
    network = load_architecture(model.config.name)(model.config, "cpu")
    lengths = [len(sequence) for sequence in sequences]
    positions = torch.cat([torch.arange(start, start + length) for length in lengths])
    context = PackedContext(model.weights, lengths)
    return network.unembed(context, network.hidden(context, torch.cat(sequences), positions))


@torch.no_grad()
def reference_logits(
    model: transformers.PreTrainedModel, sequences: list[Tensor], start: int = 0
) -> Tensor:
    """The same by transformers, each sequence alone."""

    def alone(tokens: Tensor) -> Tensor:
        positions = torch.arange(start, start + len(tokens))[None]
        return model(tokens[None], position_ids=positions, use_cache=False).logits[0]

    return torch.cat([alone(sequence) for sequence in sequences])


def random_sequences(*lengths: int, vocab_size: int = SIZES["vocab_size"]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]


def round_to(model: transformers.PreTrainedModel, kind: GGMLQuantizationType) -> None:
    """Replace every matrix by what `kind` keeps of it."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                kept = dequantize(quantize(parameter.numpy(), kind), kind)
                parameter.copy_(torch.from_numpy(kept.copy()))


def write_gguf(
    model: transformers.PreTrainedModel,
    path: Path,
    kind: GGMLQuantizationType,
    extra: Mapping[str, float | int | str] | None = None,
    factors: np.ndarray | None = None,
) -> Path:
    """A GGUF file as llama.cpp's converter writes it. extra: "{arch}."-keys to add."""
    config = model.config
    writer = GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (extra or {}).items():
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}
        add[type(value)](f"{config.model_type}.{key}", value)
    _add_tensors(writer, model, kind)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensors(
    writer: GGUFWriter, model: transformers.PreTrainedModel, kind: GGMLQuantizationType
) -> None:
    config = model.config
    arch = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[config.model_type]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        data = parameter.detach().numpy()
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            query = "q_proj" in name
            data = _interleaved(
                data, config.num_attention_heads if query else config.num_key_value_heads
            )
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, name
        if data.ndim == 1:
            writer.add_tensor(new_name, data)
        else:
            writer.add_tensor(new_name, quantize(data, kind), raw_dtype=kind)


def _interleaved(data: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows (head, half, index) -> (head, index, half): the order that llama.cpp rotates in."""
    halves = data.reshape(num_heads, 2, data.shape[0] // num_heads // 2, *data.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(data.shape))
