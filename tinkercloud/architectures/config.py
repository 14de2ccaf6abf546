"""What a network needs to know about itself, read from a Hugging Face `config.json`. No torch.

Axes of the shapes: V vocabulary, D hidden size, F intermediate size, Hq and Hkv query and
key/value heads, Dh head size. A linear is (out, in), as Hugging Face stores it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from tinkercloud.architectures import ARCHITECTURES
from tinkercloud.errors import ConfigError

ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""The rotary scalings that are implemented, with the keys that each cannot do without."""

_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

_MOST_LAYERS = 4096  # a damaged file must not make us list billions of tensors


@dataclass(frozen=True, slots=True)
class ArchitectureConfig:
    """One network's sizes and switches.

    rope_scaling: None for plain RoPE, else Hugging Face's keys with `rope_type` ("linear",
    "llama3", "yarn"); a GGUF file may also give "factors": one divisor per frequency.
    attention_bias: q, k and v; output_bias: o; mlp_bias: gate, up and down.
    """

    name: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None = field(hash=False)
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_layers > _MOST_LAYERS:
            raise ConfigError(f"num_layers is {self.num_layers}; at most {_MOST_LAYERS} make sense")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; rotary embeddings need an even one")
        if not self.rope_theta > 0 or not self.rms_norm_eps >= 0:
            raise ConfigError("rope_theta must be positive and rms_norm_eps not negative")

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Every linear that an adapter can sit on, by Hugging Face module path, "lm_head" last."""
        shapes: dict[str, tuple[int, int]] = {}
        for layer in range(self.num_layers):
            for name, shape in self._layer_linears().items():
                shapes[f"model.layers.{layer}.{name}"] = shape
        shapes["lm_head"] = (self.vocab_size, self.hidden_size)
        return shapes

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor by its name; "lm_head" only where not tied."""
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens": (self.vocab_size, self.hidden_size),
            "model.norm": (self.hidden_size,),
        }
        for layer in range(self.num_layers):
            for name in self._layer_norms():
                size = self.head_dim if "self_attn" in name else self.hidden_size
                shapes[f"model.layers.{layer}.{name}"] = (size,)
        for name, shape in self.linear_shapes().items():
            shapes[name] = shape
            if self._has_bias(name):
                shapes[f"{name}.bias"] = (shape[0],)
        if self.tie_word_embeddings:
            del shapes["lm_head"]
        return shapes

    @property
    def num_parameters(self) -> int:
        """Tied embeddings count once."""
        return sum(prod(shape) for shape in self.weight_shapes().values())

    def _layer_linears(self) -> dict[str, tuple[int, int]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }

    def _layer_norms(self) -> tuple[str, ...]:
        norms = ("input_layernorm", "post_attention_layernorm")
        return (*norms, "self_attn.q_norm", "self_attn.k_norm") if self.qk_norm else norms

    def _has_bias(self, name: str) -> bool:
        if name.endswith("o_proj"):
            return self.output_bias
        return self.attention_bias if "self_attn" in name else self.mlp_bias and "mlp" in name


def from_hf(config_json: Mapping[str, Any]) -> ArchitectureConfig:
    """The config of a Hugging Face `config.json`, as transformers 4 or 5 writes it.

    Raises ConfigError with the reason for a missing or wrong value and for what is not computed
    here: other architectures, experts, sliding windows in use, other rotary scalings.
    """
    try:
        return _from_hf(config_json)
    except KeyError as error:
        raise ConfigError(f"config.json has no {error.args[0]!r}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.json has a value of the wrong kind: {error}") from error


def _from_hf(raw: Mapping[str, Any]) -> ArchitectureConfig:
    name = _architecture_name(raw)
    _refuse_unsupported(raw)
    theta, scaling = _rope(raw)
    hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
    bias = bool(_get(raw, "attention_bias", False))
    qwen2, qwen3 = name == "Qwen2ForCausalLM", name == "Qwen3ForCausalLM"
    return ArchitectureConfig(
        name=name,
        model_type=_MODEL_TYPES[name],
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(_get(raw, "num_key_value_heads", heads)),
        head_dim=int(_get(raw, "head_dim", 128 if qwen3 else hidden // max(heads, 1))),
        rms_norm_eps=float(_get(raw, "rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=int(_get(raw, "max_position_embeddings", 2048)),
        tie_word_embeddings=bool(_get(raw, "tie_word_embeddings", False)),
        attention_bias=qwen2 or bias,
        output_bias=bias and not qwen2,
        mlp_bias=name == "LlamaForCausalLM" and bool(_get(raw, "mlp_bias", False)),
        qk_norm=qwen3,
        eos_token_ids=token_ids(raw.get("eos_token_id")),
        bos_token_id=next(iter(token_ids(raw.get("bos_token_id"))), None),
    )


def token_ids(value: Any) -> tuple[int, ...]:
    """The `eos_token_id` of Hugging Face files: null, one id or a list of ids."""
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list | tuple) else (int(value),)


def _get(raw: Mapping[str, Any], key: str, default: Any) -> Any:
    """Hugging Face writes null for "the default"."""
    value = raw.get(key)
    return default if value is None else value


def _architecture_name(raw: Mapping[str, Any]) -> str:
    names = _get(raw, "architectures", [])
    if not names:
        names = [name for name, kind in _MODEL_TYPES.items() if kind == raw.get("model_type")]
    name = str(names[0]) if names else f"of model_type {raw.get('model_type')!r}"
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"architecture {name} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return name


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if (activation := _get(raw, "hidden_act", "silu")) not in ("silu", "swish"):
        raise ConfigError(f"activation {activation!r} is not supported; only silu is")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if _get(raw, key, 0):
            raise ConfigError(f"{key} = {raw[key]}: mixtures of experts are not supported")
    for key in ("vision_config", "quantization_config"):
        if raw.get(key):
            raise ConfigError(f"folders with a {key} are not supported")
    if _uses_sliding_window(raw):
        raise ConfigError("sliding-window attention is in use; only full attention is supported")


def _uses_sliding_window(raw: Mapping[str, Any]) -> bool:
    if layer_types := raw.get("layer_types"):
        return any(kind != "full_attention" for kind in layer_types)
    if not raw.get("use_sliding_window") or raw.get("sliding_window") is None:
        return False
    return int(_get(raw, "max_window_layers", 28)) < int(raw["num_hidden_layers"])


def _rope(raw: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    """(theta, scaling): transformers 4 keeps them apart, 5 together in `rope_parameters`."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(rope.pop("rope_theta", None) or _get(raw, "rope_theta", 10000.0))
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    partial = _get(rope, "partial_rotary_factor", _get(raw, "partial_rotary_factor", 1.0))
    if float(partial) != 1.0:
        raise ConfigError(f"partial_rotary_factor = {partial} is not supported; only 1 is")
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"rotary scaling {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    if kind == "default":
        return theta, None
    for key in ROPE_TYPES[kind]:
        if not float(_get(rope, key, 0)) > 0:
            raise ConfigError(f"rotary scaling {kind!r} needs a positive {key!r}")
    original = raw.get("original_max_position_embeddings") or rope.get(
        "original_max_position_embeddings"
    )
    rope["original_max_position_embeddings"] = int(
        original or _get(raw, "max_position_embeddings", 2048)
    )
    return theta, {"rope_type": kind, **rope}
