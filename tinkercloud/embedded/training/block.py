"""One decoder block of the Llama family, forward and backward, written out.

Kept for the backward pass is what only a matrix product could compute again; norms and gates of
kept tensors, which take one pass over memory, are recomputed. The slow, obvious form is
`Llama.layer` under autograd (`reference.py`); tests compare the two.

Axes: T packed rows, D hidden, I intermediate, Hq/Hkv heads, Dh head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinkercloud.architectures.llama import Llama
from tinkercloud.architectures.qwen3 import Qwen3
from tinkercloud.embedded.training.attention import AttentionActivations, PackedAttention
from tinkercloud.embedded.training.linear import Group, Linears, Segment
from tinkercloud.embedded.training.rowwise import (
    norm_backward,
    norm_forward,
    rotate_,
    scaled,
    swiglu_backward,
    swiglu_forward,
)


@dataclass(slots=True)
class BlockActivations:
    """Kept for a block's backward pass: (T, ...) tensors, inverse norms (T, 1) float32; down_*: the
    adapters' A x, segment by segment."""

    x: Tensor
    inverse: Tensor
    down_qkv: list[Tensor | None]
    heads: tuple[Tensor, Tensor, Tensor, Tensor] | None  # q, k before their norms; inverse norms
    attention: AttentionActivations
    mixed: Tensor
    down_o: list[Tensor | None]
    middle: Tensor
    inverse_middle: Tensor
    gates: Tensor
    down_gates: list[Tensor | None]
    down_out: list[Tensor | None]


class Blocks:
    """The blocks of one architecture for the rows of one pass."""

    def __init__(
        self,
        architecture: Llama,
        linears: Linears,
        segments: Sequence[Segment],
        attention: PackedAttention,
        rotation: tuple[Tensor, Tensor],
    ):
        """rotation: cos and sin (T, Dh / 2)."""
        self._config = architecture.config
        self._linears, self._segments = linears, segments
        self._attention = attention
        self._cos, self._sin = rotation
        self._norms_heads = isinstance(architecture, Qwen3)

    def forward(
        self, index: int, x: Tensor, *, keep: bool
    ) -> tuple[Tensor, BlockActivations | None]:
        """(T, D) -> (T, D)."""
        path = f"model.layers.{index}"
        normed, inverse = self._norm(f"{path}.input_layernorm", x)
        qkv, down_qkv = self._group(_qkv(path)).forward(normed)
        q, k, v = self._split_heads(qkv)
        q, k, heads = self._norm_heads(path, q, k)
        rotate_(q, self._cos, self._sin)
        rotate_(k, self._cos, self._sin)
        mixed, attention = self._attention.forward(q, k, v, keep=keep)
        mixed = mixed.flatten(1)
        middle, down_o = self._group((f"{path}.self_attn.o_proj",)).forward(mixed)
        middle += x
        normed, inverse_middle = self._norm(f"{path}.post_attention_layernorm", middle)
        gates, down_gates = self._group(_gates(path)).forward(normed)
        product = swiglu_forward(gates)
        out, down_out = self._group((f"{path}.mlp.down_proj",)).forward(product)
        out += middle
        if not keep:
            return out, None
        return out, BlockActivations(
            x, inverse, down_qkv, heads, attention, mixed, down_o, middle, inverse_middle, gates,
            down_gates, down_out,
        )  # fmt: skip

    def backward(
        self, index: int, saved: BlockActivations, dout: Tensor, *, wants_dx: bool
    ) -> Tensor | None:
        """Adds the parameters' gradients to the models; dout (T, D) is overwritten. Returns dx or
        None."""
        dmiddle = self._feed_forward_backward(index, saved, dout)
        return self._attend_backward(index, saved, dmiddle, wants_dx=wants_dx)

    def _feed_forward_backward(self, index: int, saved: BlockActivations, dout: Tensor) -> Tensor:
        path = f"model.layers.{index}"
        product = swiglu_forward(saved.gates)
        dproduct = self._back((f"{path}.mlp.down_proj",), product, saved.down_out, dout)
        del product
        dgates = swiglu_backward(saved.gates, dproduct)
        name = f"{path}.post_attention_layernorm"
        normed = self._renorm(name, saved.middle, saved.inverse_middle)
        dnormed = self._back(_gates(path), normed, saved.down_gates, dgates)
        self._norm_back(name, saved.middle, saved.inverse_middle, dnormed, into=dout)
        return dout

    def _attend_backward(
        self, index: int, saved: BlockActivations, dmiddle: Tensor, *, wants_dx: bool
    ) -> Tensor | None:
        path = f"model.layers.{index}"
        o_proj = (f"{path}.self_attn.o_proj",)
        dmixed = self._back(o_proj, saved.mixed, saved.down_o, dmiddle)
        dqkv = dmixed.new_empty(len(dmixed), self._sizes()[-1])
        dq, dk, dv = self._split_heads(dqkv)
        self._attention.backward(saved.attention, dmixed.view_as(dq), (dq, dk, dv))
        rotate_(dq, self._cos, -self._sin)
        rotate_(dk, self._cos, -self._sin)
        if saved.heads is not None:
            self._heads_back(path, saved.heads, dq, dk)
        name = f"{path}.input_layernorm"
        normed = self._renorm(name, saved.x, saved.inverse)
        needed = wants_dx or self._linears.trains(name)
        dnormed = self._group(_qkv(path)).backward(normed, saved.down_qkv, dqkv, wants_dx=needed)
        if dnormed is None:
            return None
        self._norm_back(name, saved.x, saved.inverse, dnormed, into=dmiddle)
        return dmiddle

    def _group(self, names: Sequence[str]) -> Group:
        return Group(self._linears, names, self._segments)

    def _back(
        self, names: Sequence[str], x: Tensor, down: list[Tensor | None], dy: Tensor
    ) -> Tensor:
        dx = self._group(names).backward(x, down, dy)
        assert dx is not None, "wants_dx is the default"
        return dx

    # ---- norms

    def _norm(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        return norm_forward(x, self._linears.weight(name), self._config.rms_norm_eps)

    def _renorm(self, name: str, x: Tensor, inverse: Tensor) -> Tensor:
        return scaled(x, inverse, self._linears.weight(name))

    def _norm_back(
        self, name: str, x: Tensor, inverse: Tensor, dy: Tensor, *, into: Tensor
    ) -> None:
        """Adds dx to `into`."""
        self._linears.add_norm_gradient(name, x, inverse, dy)
        norm_backward(x, inverse, self._linears.weight(name), dy, into)

    # ---- heads

    def _sizes(self) -> tuple[int, int, int]:
        """Columns before k, before v, and all, of q, k and v side by side."""
        config = self._config
        before_k = config.num_heads * config.head_dim
        kv = config.num_kv_heads * config.head_dim
        return before_k, before_k + kv, before_k + 2 * kv

    def _split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views (T, H, Dh) of (T, all)."""
        before_k, before_v, _ = self._sizes()
        size = self._config.head_dim
        columns = (qkv[:, :before_k], qkv[:, before_k:before_v], qkv[:, before_v:])
        q, k, v = (heads.unflatten(1, (-1, size)) for heads in columns)
        return q, k, v

    def _norm_heads(
        self, path: str, q: Tensor, k: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor, Tensor] | None]:
        if not self._norms_heads:
            return q, k, None
        new_q, inverse_q = self._norm(f"{path}.self_attn.q_norm", q)
        new_k, inverse_k = self._norm(f"{path}.self_attn.k_norm", k)
        return new_q, new_k, (q, k, inverse_q, inverse_k)

    def _heads_back(
        self, path: str, heads: tuple[Tensor, Tensor, Tensor, Tensor], dq: Tensor, dk: Tensor
    ) -> None:
        """dq and dk become the gradients of what entered the norms."""
        q, k, inverse_q, inverse_k = heads
        for name, x, inverse, grad in (("q", q, inverse_q, dq), ("k", k, inverse_k, dk)):
            dx = torch.zeros_like(grad)
            norm = f"{path}.self_attn.{name}_norm"
            self._norm_back(norm, x, inverse, grad.contiguous(), into=dx)
            grad.copy_(dx)


def _qkv(path: str) -> tuple[str, str, str]:
    attention = f"{path}.self_attn"
    return f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"


def _gates(path: str) -> tuple[str, str]:
    return f"{path}.mlp.gate_proj", f"{path}.mlp.up_proj"


def neighbours(num_layers: int) -> list[tuple[str, ...]]:
    """Groups of matrices that read the same rows, for `join_weights`."""
    paths = [f"model.layers.{index}" for index in range(num_layers)]
    return [group for path in paths for group in (_qkv(path), _gates(path))]
