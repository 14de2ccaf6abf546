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

from tinkercloud.architectures.blocks import Scoring
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
        """The weight of "model.layers.3.input_layernorm" (D,), or of q_norm and k_norm."""
        ...

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """Causal attention of each packed sequence.

        q (T, Hq, Dh), k and v (T, Hkv, Dh), rotated -> (T, Hq, Dh).
        """
        ...


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, in float32, cast back before the scale; after it
    where the scale is of another type."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if scale.dtype != x.dtype:
        return (wide * scale).to(x.dtype)
    return scale * wide.to(x.dtype)


def norm_scale(config: ArchitectureConfig, name: str, weight: Tensor) -> Tensor:
    """What a norm multiplies with: its weight, or float32 where the family changes it. The final
    norm has the scale of the logits too."""
    factor = norm_slope(config, name)
    if config.norm_offset == 0.0 and factor == 1.0:
        return weight
    return (weight.float() + config.norm_offset) * factor


def norm_slope(config: ArchitectureConfig, name: str) -> float:
    """The derivative of a norm's scale by its weight."""
    return config.logit_scale if name == "model.norm" else 1.0


def gated(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    """The activation of gate, times up."""
    if activation == "silu":
        return F.silu(gate) * up
    assert activation == "gelu_tanh"
    return F.gelu(gate, approximate="tanh") * up


def capped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap); cap 0: x."""
    return torch.tanh(x / cap) * cap if cap else x


def attend(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, first: int = 0) -> Tensor:
    """Causal attention of one sequence, written plainly: q (n, Hq, Dh) at positions from `first`
    on, k and v (P, Hkv, Dh) from 0 on -> (n, Hq, Dh). Scores and probabilities are float32."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (k, v))
    scores = (q.transpose(0, 1) @ k.transpose(1, 2)).float() * scoring.scale
    positions = torch.arange(first, first + len(q), device=q.device)[:, None]
    distance = positions - torch.arange(k.shape[1], device=q.device)[None]
    hidden = distance < 0
    if scoring.window:
        hidden |= distance >= scoring.window
    probabilities = capped(scores, scoring.cap).masked_fill(hidden, -torch.inf).softmax(-1)
    return (probabilities.to(v.dtype) @ v).transpose(0, 1)


def attend_many(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """The same of B whole sequences, by PyTorch's own attention where scores have no cap:
    q (B, Hq, L, Dh), k and v (B, Hkv, L, Dh) -> (B, Hq, L, Dh)."""
    if scoring.cap:
        rows = zip(*(x.transpose(1, 2) for x in (q, k, v)), strict=True)
        alone = [attend(one_q, one_k, one_v, scoring) for one_q, one_k, one_v in rows]
        return torch.stack(alone).transpose(1, 2)
    mask = None
    if scoring.window:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        mask = mask.triu(1 - scoring.window)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scoring.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first R dimensions of x (T, H, Dh) by cos and sin (T, R / 2): the two
    halves are paired, as by Hugging Face, or adjacent dimensions.

    In x's own number type, as Hugging Face does it: in bfloat16 the rounding of this product is
    part of what other implementations of the same weights compute.
    """
    size = 2 * cos.shape[-1]
    rotary, rest = x[..., :size], x[..., size:]
    if interleaved:
        first, second = rotary[..., ::2], rotary[..., 1::2]
    else:
        first, second = rotary.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    rotary = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return rotary if size == x.shape[-1] else torch.cat((rotary, rest), dim=-1)


def rotary_frequencies(config: ArchitectureConfig) -> tuple[Tensor, float]:
    """float32 (R / 2,) radians per position, of the R dimensions of a head that are rotated, and
    the factor on cos and sin (1 except for YaRN)."""
    exponents = torch.arange(0, config.num_rotated, 2, dtype=torch.float32) / config.num_rotated
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
    original, size = scaling["original_max_position_embeddings"], config.num_rotated

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
