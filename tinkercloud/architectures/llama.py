"""Llama (Hugging Face `LlamaForCausalLM`), and the families that are the same decoder with other
switches (`families`).

A pure function over a Context: the only state is the config and the rotary frequencies.
T rows, D hidden size, V vocabulary, H heads, Dh head size, R rotated dimensions of a head, K rotary
tables.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tinkercloud.architectures.config import ArchitectureConfig
from tinkercloud.architectures.layers import (
    Context,
    Show,
    capped,
    gated,
    norm_scale,
    rms_norm,
    rotary_frequencies,
    rotate,
)


class Llama:
    def __init__(self, config: ArchitectureConfig, device: torch.device | str):
        self.config = config
        tables = [rotary_frequencies(config)]
        if config.window_rope_theta is not None:
            plain = replace(config, rope_theta=config.window_rope_theta, rope_scaling=None)
            tables.append(rotary_frequencies(plain))
        self._frequencies = torch.stack([frequencies for frequencies, _ in tables]).to(device)
        self._magnitudes = torch.tensor([magnitude for _, magnitude in tables], device=device)

    def hidden(
        self, ctx: Context, tokens: Tensor, positions: Tensor, show: Show | None = None
    ) -> Tensor:
        """tokens and positions int64 (T,) -> (T, D) after the final norm. show: is given what every
        block puts out."""
        cos, sin = self.rotary(positions)
        x, last = self.embed(ctx, tokens), self.config.num_layers
        for index in range(last):
            x = self.layer(ctx, index, x, cos, sin)
            if show is not None and index + 1 < last:
                show(index + 1, x)
        x = self.final_norm(ctx, x)
        if show is not None:
            show(last, x)
        return x

    def embed(self, ctx: Context, tokens: Tensor) -> Tensor:
        """int64 (T,) -> (T, D): what enters the first block."""
        x, scale = ctx.embed(tokens), self.config.embedding_scale
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype, device=x.device)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """int64 (T,) -> cos and sin, float32 (T, K R / 2): of all tables, side by side."""
        angles = positions.to(torch.float32)[:, None, None] * self._frequencies
        factors = self._magnitudes[:, None]
        return (angles.cos() * factors).flatten(1), (angles.sin() * factors).flatten(1)

    def layer(self, ctx: Context, index: int, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """One block, (T, D) -> (T, D); separate, so that a trainer can recompute it."""
        path, norms = f"model.layers.{index}", self.config.norms
        normed = self._norm_at(ctx, path, norms.before_attention, x)
        mixed = self._attend(ctx, index, normed, cos, sin)
        x = x + self._added(ctx, path, norms.after_attention, mixed)
        normed = self._norm_at(ctx, path, norms.before_mlp, x)
        gate = ctx.linear(f"{path}.mlp.gate_proj", normed)
        up = ctx.linear(f"{path}.mlp.up_proj", normed)
        product = gated(self.config.activation, gate, up)
        fed = ctx.linear(f"{path}.mlp.down_proj", product)
        return x + self._added(ctx, path, norms.after_mlp, fed)

    def final_norm(self, ctx: Context, x: Tensor) -> Tensor:
        """(T, D) -> (T, D): what follows the last block."""
        return self._norm(ctx, "model.norm", x)

    def unembed(self, ctx: Context, h: Tensor) -> Tensor:
        """(T, D) -> logits (T, V)."""
        return capped(ctx.linear("lm_head", h), self.config.logit_cap)

    def _attend(self, ctx: Context, index: int, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        path = f"model.layers.{index}.self_attn"
        config, size = self.config, self.config.head_dim
        q, k = (self._heads(ctx, f"{path}.{name}", x) for name in "qk")
        v = ctx.linear(f"{path}.v_proj", x).unflatten(-1, (config.num_kv_heads, size))
        cos, sin = (table_of(config, index, angles) for angles in (cos, sin))
        q, k = (rotate(y, cos, sin, interleaved=config.rotary_interleaved) for y in (q, k))
        mixed = ctx.attention(index, q, k, v, config.scoring(index))
        return ctx.linear(f"{path}.o_proj", mixed.flatten(1))

    def _heads(self, ctx: Context, path: str, x: Tensor) -> Tensor:
        """q or k (T, H, Dh), before the rotation."""
        config = self.config
        y = ctx.linear(f"{path}_proj", x)
        if config.qk_norm and config.qk_norm_spans_heads:
            y = self._norm(ctx, f"{path}_norm", y)
        heads = y.unflatten(-1, (-1, config.head_dim))
        if config.qk_norm and not config.qk_norm_spans_heads:
            heads = self._norm(ctx, f"{path}_norm", heads)
        return heads

    def _norm_at(self, ctx: Context, path: str, leaf: str | None, x: Tensor) -> Tensor:
        return x if leaf is None else self._norm(ctx, f"{path}.{leaf}", x)

    def _added(self, ctx: Context, path: str, norm: str | None, x: Tensor) -> Tensor:
        """What is added to the residual for what a module has put out."""
        if self.config.residual_scale != 1.0:
            x = x * self.config.residual_scale
        return self._norm_at(ctx, path, norm, x)

    def _norm(self, ctx: Context, name: str, x: Tensor) -> Tensor:
        scale = norm_scale(self.config, name, ctx.norm_weight(name))
        return rms_norm(x, scale, self.config.rms_norm_eps)


def table_of(config: ArchitectureConfig, layer: int, angles: Tensor) -> Tensor:
    """Of all rotary tables (T, K R / 2), the layer's (T, R / 2)."""
    half, table = config.num_rotated // 2, config.rotary_table(layer)
    return angles[:, half * table : half * (table + 1)]
