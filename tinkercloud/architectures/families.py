"""The families of networks: a row each, with what their config.json says beyond sizes. No torch.

A row's `read` gives fields of `ArchitectureConfig`, from a config whose `defaults` are filled in.
What a config asks for and no field says is refused by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tinkercloud.architectures.blocks import LayerNorms
from tinkercloud.errors import ConfigError

Raw = Mapping[str, Any]

_OPTIONAL = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class Family:
    """defaults: of config.json, where they are not those of Llama. rotates_part: whether it reads a
    `partial_rotary_factor`."""

    model_type: str
    read: Callable[[Raw], dict[str, Any]]
    defaults: Raw = field(default_factory=dict[str, Any])
    rotates_part: bool = False

    def filled(self, raw: Raw) -> Raw:
        """Hugging Face writes null for "the default", and for a window or cap that there is not."""
        none = {key for key in _OPTIONAL if key in raw}
        defaults = {key: value for key, value in self.defaults.items() if key not in none}
        return {**defaults, **{key: value for key, value in raw.items() if value is not None}}


def _llama(raw: Raw) -> dict[str, Any]:
    _refuse_windows(raw)
    return _biases(raw) | {"mlp_bias": bool(raw.get("mlp_bias"))}


def _ministral(raw: Raw) -> dict[str, Any]:
    return {"windows": _windows(raw, slides=lambda _: True)}


def _mistral(raw: Raw) -> dict[str, Any]:
    if any(kind != _SLIDING for kind in raw.get("layer_types") or ()):
        raise ConfigError("layer_types are not read by this architecture: its layers are alike")
    return {"windows": _windows(raw, slides=lambda _: True)}


def _qwen2(raw: Raw) -> dict[str, Any]:
    return {"attention_bias": True, "windows": _qwen_windows(raw)}


def _qwen3(raw: Raw) -> dict[str, Any]:
    return _biases(raw) | {"qk_norm": True, "windows": _qwen_windows(raw)}


def _gemma2(raw: Raw) -> dict[str, Any]:
    if raw.get("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention is not supported; attention is causal")
    return _biases(raw) | {
        "norms": LayerNorms(
            after_attention="post_attention_layernorm",
            before_mlp="pre_feedforward_layernorm",
            after_mlp="post_feedforward_layernorm",
        ),
        "norm_offset": 1.0,
        "embedding_scale": float(raw["hidden_size"]) ** 0.5,
        "score_scale": float(raw["query_pre_attn_scalar"]) ** -0.5,
        "score_cap": float(raw.get("attn_logit_softcapping") or 0.0),
        "logit_cap": float(raw.get("final_logit_softcapping") or 0.0),
        "windows": _windows(raw, slides=lambda layer: layer % 2 == 0),
    }


def _gemma3(raw: Raw) -> dict[str, Any]:
    pattern = int(raw.get("sliding_window_pattern") or 6)
    return _gemma2(raw) | {
        "qk_norm": True,
        "windows": _windows(raw, slides=lambda layer: (layer + 1) % pattern != 0),
        "window_rope_theta": _window_rope_theta(raw),
    }


def _olmo2(raw: Raw) -> dict[str, Any]:
    return _biases(raw) | {
        "norms": LayerNorms(
            before_attention=None,
            after_attention="post_attention_layernorm",
            before_mlp=None,
            after_mlp="post_feedforward_layernorm",
        ),
        "qk_norm": True,
        "qk_norm_spans_heads": True,
    }


def _ernie4_5(raw: Raw) -> dict[str, Any]:
    bias = bool(raw.get("use_bias"))
    biases = {"attention_bias": bias, "output_bias": bias, "mlp_bias": bias}
    return biases | {"rotary_interleaved": True}


def _helium(raw: Raw) -> dict[str, Any]:
    return _llama(raw) | {"output_bias": False, "rotary_interleaved": True}


def _granite(raw: Raw) -> dict[str, Any]:
    return _llama(raw) | {
        "embedding_scale": float(raw["embedding_multiplier"]),
        "residual_scale": float(raw["residual_multiplier"]),
        "score_scale": float(raw["attention_multiplier"]),
        "logit_scale": 1.0 / float(raw["logits_scaling"]),
    }


_GEMMA = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA2 = {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_ERNIE = {"head_dim": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
_GRANITE = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", _llama),
    "MistralForCausalLM": Family("mistral", _mistral, {"sliding_window": 4096}),
    "MinistralForCausalLM": Family("ministral", _ministral, {"sliding_window": 4096}),
    "Qwen2ForCausalLM": Family("qwen2", _qwen2),
    "Qwen3ForCausalLM": Family("qwen3", _qwen3, {"head_dim": 128}),
    "Gemma2ForCausalLM": Family("gemma2", _gemma2, _GEMMA2),
    "Gemma3ForCausalLM": Family("gemma3_text", _gemma3, {**_GEMMA, "rope_theta": 1e6}),
    "Olmo2ForCausalLM": Family("olmo2", _olmo2, {"rms_norm_eps": 1e-5}),
    "GraniteForCausalLM": Family("granite", _granite, _GRANITE),
    "Ernie4_5ForCausalLM": Family("ernie4_5", _ernie4_5, _ERNIE),
    "HeliumForCausalLM": Family("helium", _helium, {"head_dim": 128, "rms_norm_eps": 1e-8}),
}


def _biases(raw: Raw) -> dict[str, Any]:
    bias = bool(raw.get("attention_bias"))
    return {"attention_bias": bias, "output_bias": bias}


def _windows(raw: Raw, slides: Callable[[int], bool]) -> tuple[int, ...]:
    """Of each layer, 0 for all positions; empty where no layer has one. slides: which layers do,
    unless `layer_types` says so."""
    layers = int(raw["num_hidden_layers"])
    types = raw.get("layer_types") or [_SLIDING if slides(i) else _FULL for i in range(layers)]
    if len(types) != layers:
        raise ConfigError(f"layer_types has {len(types)} entries for {layers} layers")
    for kind in types:
        if kind not in (_SLIDING, _FULL):
            raise ConfigError(f"attention of the kind {kind!r} is not supported")
    window = int(raw.get("sliding_window") or 0)
    windows = tuple(window if kind == _SLIDING else 0 for kind in types)
    return windows if any(windows) else ()


def _qwen_windows(raw: Raw) -> tuple[int, ...]:
    if not (raw.get("use_sliding_window") or raw.get("layer_types")):
        return ()
    first = int(raw.get("max_window_layers", 28))
    return _windows(raw, slides=lambda layer: layer >= first)


def _refuse_windows(raw: Raw) -> None:
    """Of families that have none, where a config asks for it."""
    kinds = raw.get("layer_types") or ()
    if any(kind != _FULL for kind in kinds) or any(_qwen_windows({**raw, "layer_types": None})):
        raise ConfigError("sliding-window attention is in use, which this architecture lacks")


def _window_rope_theta(raw: Raw) -> float:
    """The rotary base of layers with a window: transformers 4 has a key of its own for it."""
    rope = raw.get("rope_parameters") or {}
    local = rope.get(_SLIDING) or {}
    if local.get("rope_type", "default") != "default":
        raise ConfigError(f"rotary scaling {local['rope_type']!r} of layers with a window")
    return float(local.get("rope_theta") or raw.get("rope_local_base_freq") or 10000.0)
