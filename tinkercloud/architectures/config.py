"""What a network needs to know about itself, read from a Hugging Face `config.json`. No torch.

Axes of the shapes: V vocabulary, D hidden size, F intermediate size, Hq and Hkv query and
key/value heads, Dh head size. A linear is (out, in), as Hugging Face stores it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any

from tinkercloud.architectures import ARCHITECTURES
from tinkercloud.architectures.blocks import PRE_NORMS, LayerNorms, Scoring
from tinkercloud.architectures.families import FAMILIES
from tinkercloud.errors import ConfigError

ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""The rotary scalings that are implemented, with the keys that each cannot do without."""

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
"""Hugging Face's names for those of the gate that are implemented."""

_MOST_LAYERS = 4096  # a damaged file must not make us list billions of tensors


@dataclass(frozen=True, slots=True)
class ArchitectureConfig:
    """One network's sizes and switches.

    rope_scaling: None for plain RoPE, else Hugging Face's keys with `rope_type` ("linear",
    "llama3", "yarn"); a GGUF file may also give "factors": one divisor per frequency.
    attention_bias: q, k and v; output_bias: o; mlp_bias: gate, up and down.

    qk_norm: q and k have norms of each head, or with qk_norm_spans_heads of all heads together.
    norm_offset: is added to the weights of norms, but not to a bias. activation: of the gate,
    "silu" or "gelu_tanh". rotary_dim: how many dimensions of a head are rotated, None for all;
    rotary_interleaved: adjacent dimensions are paired, not halves. windows: of each layer, 0
    for all positions; empty: no layer has one. window_rope_theta: the plain rotary base of layers
    with a window, None for that of the others. score_scale: of attention, None for Dh ** -0.5.
    Caps are those of cap * tanh(x / cap), 0 for none. residual_scale: of what attention and MLP
    add.
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
    norms: LayerNorms = PRE_NORMS
    norm_offset: float = 0.0
    qk_norm_spans_heads: bool = False
    activation: str = "silu"
    rotary_dim: int | None = None
    rotary_interleaved: bool = False
    windows: tuple[int, ...] = ()
    window_rope_theta: float | None = None
    score_scale: float | None = None
    score_cap: float = 0.0
    logit_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0

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
        if self.num_rotated % 2 or not 0 < self.num_rotated <= self.head_dim:
            raise ConfigError(
                f"{self.num_rotated} of {self.head_dim} dimensions of a head cannot be rotated"
            )

    @property
    def num_rotated(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def num_rotary_tables(self) -> int:
        """Two where layers with a window have a rotary base of their own: the second one's."""
        return 1 if self.window_rope_theta is None else 2

    def rotary_table(self, layer: int) -> int:
        """Which of them the layer reads."""
        return int(self.num_rotary_tables == 2 and self.scoring(layer).window > 0)

    def scoring(self, layer: int) -> Scoring:
        scale = self.head_dim**-0.5 if self.score_scale is None else self.score_scale
        return Scoring(scale, self.score_cap, self.windows[layer] if self.windows else 0)

    @property
    def is_plain(self) -> bool:
        """Whether it is computed by passes that know biases and norms of heads, but no other
        switch."""
        switches = (
            "norms", "norm_offset", "qk_norm_spans_heads", "activation", "rotary_dim",
            "rotary_interleaved", "windows", "window_rope_theta", "score_scale", "score_cap",
            "logit_cap", "embedding_scale", "residual_scale", "logit_scale",
        )  # fmt: skip
        defaults = {field.name: field.default for field in fields(self)}
        return all(getattr(self, name) == defaults[name] for name in switches)

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
            for name, size in self._layer_norms().items():
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

    @property
    def attention_span(self) -> float:
        """Positions over which a row's attention takes as many multiplications as its products with
        the matrices of the layers."""
        products = sum(prod(shape) for shape in self._layer_linears().values())
        return products / (2 * self.num_heads * self.head_dim)

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

    def _layer_norms(self) -> dict[str, int]:
        sizes = dict.fromkeys(self.norms.names, self.hidden_size)
        if self.qk_norm:
            q_heads, kv_heads = self.num_heads, self.num_kv_heads
            for name, heads in (("self_attn.q_norm", q_heads), ("self_attn.k_norm", kv_heads)):
                sizes[name] = self.head_dim * (heads if self.qk_norm_spans_heads else 1)
        return sizes

    def _has_bias(self, name: str) -> bool:
        if name.endswith("o_proj"):
            return self.output_bias
        return self.attention_bias if "self_attn" in name else self.mlp_bias and "mlp" in name


def from_hf(config_json: Mapping[str, Any]) -> ArchitectureConfig:
    """The config of a Hugging Face `config.json`, as transformers 4 or 5 writes it.

    Raises ConfigError with the reason for a missing or wrong value and for what is not computed
    here: other architectures, activations and rotary scalings, experts, kinds of attention.
    """
    try:
        return _from_hf(config_json)
    except KeyError as error:
        raise ConfigError(f"config.json has no {error.args[0]!r}") from error
    except (TypeError, ValueError, OverflowError) as error:  # the last for int(inf)
        raise ConfigError(f"config.json has a value of the wrong kind: {error}") from error


def _from_hf(raw: Mapping[str, Any]) -> ArchitectureConfig:
    name = _architecture_name(raw)
    family = FAMILIES[name]
    raw = family.filled(raw)
    _refuse_unsupported(raw)
    theta, scaling, part = _rope(raw)
    if part != 1.0 and not family.rotates_part:
        raise ConfigError(f"partial_rotary_factor = {part} is not read by {name}; only 1 is")
    hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
    head_dim = int(raw.get("head_dim", hidden // max(heads, 1)))
    biases = {"attention_bias": False, "output_bias": False, "mlp_bias": False}
    fields = {**biases, "qk_norm": False, **family.read(raw)}
    return ArchitectureConfig(
        name=name,
        model_type=family.model_type,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads", heads)),
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=token_ids(raw.get("eos_token_id")),
        bos_token_id=next(iter(token_ids(raw.get("bos_token_id"))), None),
        activation=_activation(raw),
        rotary_dim=None if part == 1.0 else int(head_dim * part),
        **fields,
    )


def token_ids(value: Any) -> tuple[int, ...]:
    """The `eos_token_id` of Hugging Face files: null, one id or a list of ids."""
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list | tuple) else (int(value),)


def _architecture_name(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    if not names:
        names = [name for name, f in FAMILIES.items() if f.model_type == raw.get("model_type")]
    name = str(names[0]) if names else f"of model_type {raw.get('model_type')!r}"
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"architecture {name} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return name


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if raw.get(key):
            raise ConfigError(f"{key} = {raw[key]}: mixtures of experts are not supported")
    for key in ("vision_config", "quantization_config"):
        if raw.get(key):
            raise ConfigError(f"folders with a {key} are not supported")


def _activation(raw: Mapping[str, Any]) -> str:
    name = raw.get("hidden_activation") or raw.get("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _rope(raw: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None, float]:
    """(theta, scaling, the part of a head that is rotated): transformers 4 keeps them apart, 5
    together in `rope_parameters`; by kinds of layers where these differ."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    if "full_attention" in rope:
        rope = dict(rope["full_attention"])
    theta = float(rope.pop("rope_theta", None) or raw.get("rope_theta", 10000.0))
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    part = float(rope.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor", 1.0))
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"rotary scaling {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    if kind == "default":
        return theta, None, part
    for key in ROPE_TYPES[kind]:
        if not float(rope.get(key) or 0) > 0:
            raise ConfigError(f"rotary scaling {kind!r} needs a positive {key!r}")
    original = raw.get("original_max_position_embeddings") or rope.get(
        "original_max_position_embeddings"
    )
    rope["original_max_position_embeddings"] = int(
        original or raw.get("max_position_embeddings", 2048)
    )
    return theta, {"rope_type": kind, **rope}, part
