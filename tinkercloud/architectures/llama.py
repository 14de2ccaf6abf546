"""Llama (Hugging Face `LlamaForCausalLM`), and the decoder that the other families vary.

A pure function over a Context: the only state is the config and the rotary frequencies.
T rows, D hidden size, V vocabulary, H heads, Dh head size.
"""

import torch
from torch import Tensor

from tinkercloud.architectures.config import ArchitectureConfig
from tinkercloud.architectures.layers import (
    Context,
    Show,
    rms_norm,
    rotary_frequencies,
    rotate,
    swiglu,
)


class Llama:
    def __init__(self, config: ArchitectureConfig, device: torch.device | str):
        self.config = config
        frequencies, self._magnitude = rotary_frequencies(config)
        self._frequencies = frequencies.to(device)

    def hidden(
        self, ctx: Context, tokens: Tensor, positions: Tensor, show: Show | None = None
    ) -> Tensor:
        """tokens and positions int64 (T,) -> (T, D) after the final norm. show: is given what every
        block puts out."""
        cos, sin = self.rotary(positions)
        x, last = ctx.embed(tokens), self.config.num_layers
        for index in range(last):
            x = self.layer(ctx, index, x, cos, sin)
            if show is not None and index + 1 < last:
                show(index + 1, x)
        x = self.final_norm(ctx, x)
        if show is not None:
            show(last, x)
        return x

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """int64 (T,) -> cos and sin, float32 (T, Dh / 2)."""
        angles = positions.to(torch.float32).unsqueeze(-1) * self._frequencies
        return angles.cos() * self._magnitude, angles.sin() * self._magnitude

    def layer(self, ctx: Context, index: int, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """One block, (T, D) -> (T, D); separate, so that a trainer can recompute it."""
        path = f"model.layers.{index}"
        x = x + self._attend(ctx, index, self._norm(ctx, f"{path}.input_layernorm", x), cos, sin)
        normed = self._norm(ctx, f"{path}.post_attention_layernorm", x)
        gate = ctx.linear(f"{path}.mlp.gate_proj", normed)
        up = ctx.linear(f"{path}.mlp.up_proj", normed)
        return x + ctx.linear(f"{path}.mlp.down_proj", swiglu(gate, up))

    def final_norm(self, ctx: Context, x: Tensor) -> Tensor:
        """(T, D) -> (T, D): what follows the last block."""
        return self._norm(ctx, "model.norm", x)

    def unembed(self, ctx: Context, h: Tensor) -> Tensor:
        """(T, D) -> logits (T, V)."""
        return ctx.linear("lm_head", h)

    def _attend(self, ctx: Context, index: int, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        path = f"model.layers.{index}.self_attn"
        config, size = self.config, self.config.head_dim
        q = ctx.linear(f"{path}.q_proj", x).unflatten(-1, (config.num_heads, size))
        k = ctx.linear(f"{path}.k_proj", x).unflatten(-1, (config.num_kv_heads, size))
        v = ctx.linear(f"{path}.v_proj", x).unflatten(-1, (config.num_kv_heads, size))
        q, k = self._norm_heads(ctx, path, q, k)
        mixed = ctx.attention(index, rotate(q, cos, sin), rotate(k, cos, sin), v)
        return ctx.linear(f"{path}.o_proj", mixed.flatten(1))

    def _norm_heads(self, ctx: Context, path: str, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """What a family does to q and k (T, H, Dh) before the rotation; here nothing."""
        return q, k

    def _norm(self, ctx: Context, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, ctx.norm_weight(name), self.config.rms_norm_eps)
