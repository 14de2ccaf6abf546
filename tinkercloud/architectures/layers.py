"""The pieces that the decoders share, and what a runner supplies to them.

T rows (tokens of any number of sequences, packed without padding), D hidden size, V vocabulary,
H heads, Dh head size. Every function here is row-wise: a row's result depends on that row alone.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkercloud.architectures.config import ArchitectureConfig
from tinkercloud.errors import ConfigError

Show = Callable[[int, Tensor], None]
"""Is given a block's number, from 1 on, and what it put out (T, D); of the last block what follows
the final norm. To be copied: it may be changed after."""


class Context(Protocol):
    """Weights and attention, by Hugging Face module path; whoever runs the network owns them."""

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x (T, in) -> (T, out) through "model.layers.3.self_attn.q_proj", its bias included."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 (T,) -> (T, D)."""
        ...

    def norm_weight(self, name: str) -> Tensor:
        """The scale of "model.layers.3.input_layernorm": (D,), or (Dh,) for q_norm and k_norm."""
        ...

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of each packed sequence, scaled by Dh ** -0.5.

        q (T, Hq, Dh), k and v (T, Hkv, Dh), rotated -> (T, Hq, Dh).
        """
        ...


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, in float32, cast back before the scale."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (T, H, Dh) by cos and sin (T, Dh / 2); halves as Hugging Face pairs them.

    In x's own number type, as Hugging Face does it: in bfloat16 the rounding of this product is
    part of what other implementations of the same weights compute.
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotary_frequencies(config: ArchitectureConfig) -> tuple[Tensor, float]:
    """float32 (Dh / 2,) radians per position, and the factor on cos and sin (1 except for YaRN)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    powers = config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return 1.0 / powers, 1.0
    match scaling["rope_type"]:
        case "linear":
            return 1.0 / powers / scaling["factor"], 1.0
        case "factors":
            return 1.0 / powers / torch.tensor(scaling["factors"], dtype=torch.float32), 1.0
        case "llama3":
            return _llama3_frequencies(1.0 / powers, scaling), 1.0
        case "yarn":
            return _yarn_frequencies(powers, config, scaling), _yarn_magnitude(scaling)
        case unknown:
            raise ConfigError(f"rotary scaling {unknown!r} is not supported")


def _llama3_frequencies(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: long waves slowed by `factor`, short ones kept, a linear blend between the two."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi / frequencies)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling["factor"] + kept * frequencies


def _yarn_frequencies(
    powers: Tensor, config: ArchitectureConfig, scaling: Mapping[str, Any]
) -> Tensor:
    """YaRN (arXiv 2309.00071): interpolate the dimensions that turn less than `beta_slow` times."""
    original, size = scaling["original_max_position_embeddings"], config.head_dim

    def dimension(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low = dimension(scaling.get("beta_fast") or 32.0)
    high = dimension(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    kept = 1 - ramp
    return 1.0 / (scaling["factor"] * powers) * (1 - kept) + 1.0 / powers * kept


def _yarn_magnitude(scaling: Mapping[str, Any]) -> float:
    def magnitude(scale: float) -> float:
        factor = scaling["factor"]
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is not None:
        return float(attention_factor)
    part, whole = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return magnitude(part) / magnitude(whole) if part and whole else magnitude(1.0)
