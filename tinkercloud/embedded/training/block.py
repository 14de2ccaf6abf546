"""One decoder block of the Llama family, forward and backward, written out.

Kept for the backward pass is what only a matrix product could compute again; norms and gates of
kept tensors, which take one pass over memory, are recomputed. The slow, obvious form is
`Llama.layer` under autograd (`reference.py`); tests compare the two. The forward half is the
compiled pass's (`compiled_blocks`) or PyTorch's (`torch_blocks`), the backward half this one.

Axes: T packed rows, D hidden, I intermediate, Hq/Hkv heads, Dh head size.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinkercloud.architectures.layers import norm_scale, norm_slope
from tinkercloud.architectures.llama import Llama
from tinkercloud.embedded.training.attention import AttentionActivations
from tinkercloud.embedded.training.linear import Group, Linears, Segment
from tinkercloud.embedded.training.rowwise import RowWise


@dataclass(slots=True)
class BlockActivations:
    """Kept for a block's backward pass: (T, ...) tensors. x and middle, which attention and MLP
    begin with, are of the type that lies between blocks, and so are heads, q and k before their
    norms, and outs, what enters the norms after attention and MLP. The others are of the model's
    type. attention: q, k and v, or what PyTorch's attention keeps."""

    x: Tensor
    heads: tuple[Tensor, Tensor] | None
    attention: tuple[Tensor, Tensor, Tensor] | AttentionActivations
    mixed: Tensor
    middle: Tensor
    gates: Tensor
    outs: tuple[Tensor | None, Tensor | None]


class Blocks(ABC):
    """The blocks of one architecture for the rows of one pass. Between blocks, and in gradients,
    numbers are of one type: float32 in the compiled pass, else the model's."""

    def __init__(
        self,
        architecture: Llama,
        linears: Linears,
        segments: Sequence[Segment],
        rotation: tuple[Tensor, Tensor],
        rowwise: RowWise,
    ):
        """rotation: cos and sin (T, K R / 2)."""
        self._config = config = architecture.config
        self._linears, self._segments = linears, segments
        halves = (angles.chunk(config.num_rotary_tables, dim=1) for angles in rotation)
        tables = zip(*halves, strict=True)
        self._tables = [(cos.contiguous(), sin.contiguous()) for cos, sin in tables]
        self._rowwise = rowwise

    @abstractmethod
    def embed(self) -> Tensor:
        """(T, D)."""
        ...

    @abstractmethod
    def forward(
        self, index: int, x: Tensor, *, keep: bool
    ) -> tuple[Tensor, BlockActivations | None]:
        """(T, D) -> (T, D)."""
        ...

    @abstractmethod
    def final_norm(self, x: Tensor) -> Tensor:
        """Of what the last block put out just now."""
        ...

    @abstractmethod
    def _attention_backward(
        self,
        index: int,
        saved: BlockActivations,
        dmixed: Tensor,
        into: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """dmixed (T, Hq, Dh); dq, dk and dv go to `into`, shaped as q, k and v."""
        ...

    def final_norm_backward(self, x: Tensor, dy: Tensor) -> Tensor:
        dx = torch.zeros_like(x)
        _, inverse = self._norm("model.norm", x)
        self._norm_back("model.norm", x, inverse, dy, into=dx)
        return dx

    def backward(
        self, index: int, saved: BlockActivations, dout: Tensor, *, wants_dx: bool
    ) -> Tensor | None:
        """Adds the parameters' gradients to the models; dout (T, D) is overwritten. Returns dx or
        None."""
        dmiddle = self._feed_forward_backward(index, saved, dout)
        return self._attend_backward(index, saved, dmiddle, wants_dx=wants_dx)

    def _feed_forward_backward(self, index: int, saved: BlockActivations, dout: Tensor) -> Tensor:
        path, norms = f"model.layers.{index}", self._config.norms
        dfed = self._added_back(path, norms.after_mlp, saved.outs[1], dout)
        normed, inverse = self._norm_at(path, norms.before_mlp, saved.middle)
        dnormed = self._gates_backward(path, normed, saved.gates, dfed)
        if inverse is None:
            return dout.add_(dnormed)
        self._norm_back(f"{path}.{norms.before_mlp}", saved.middle, inverse, dnormed, into=dout)
        return dout

    def _gates_backward(self, path: str, normed: Tensor, gates: Tensor, dout: Tensor) -> Tensor:
        """The gradient of normed (T, D) through gate, up and down."""
        activation = self._config.activation
        product = self._rowwise.gated(activation, gates)
        dproduct = self._back((f"{path}.mlp.down_proj",), product, dout)
        del product
        dgates = self._rowwise.gated_gradient(activation, gates, dproduct)
        return self._back(gate_names(path), normed, dgates)

    def _attend_backward(
        self, index: int, saved: BlockActivations, dmiddle: Tensor, *, wants_dx: bool
    ) -> Tensor | None:
        path, norms = f"model.layers.{index}", self._config.norms
        mixed = saved.mixed.to(dmiddle.dtype)
        dout = self._added_back(path, norms.after_attention, saved.outs[0], dmiddle)
        dmixed = self._back((f"{path}.self_attn.o_proj",), mixed, dout)
        dqkv = dmixed.new_empty(len(dmixed), self._sizes()[-1])
        dq, dk, dv = self._split_heads(dqkv)
        self._attention_backward(index, saved, dmixed.view_as(dq), (dq, dk, dv))
        self._rotate(index, dq, dk, back=True)
        if saved.heads is not None:
            self._heads_back(path, saved.heads, dq, dk)
        before = norms.before_attention
        normed, inverse = self._norm_at(path, before, saved.x)
        needed = wants_dx or (before is not None and self._linears.trains(f"{path}.{before}"))
        dnormed = self._group(qkv_names(path)).backward(normed, dqkv, wants_dx=needed)
        if dnormed is None:
            return None
        if inverse is None:
            return dmiddle.add_(dnormed)
        self._norm_back(f"{path}.{before}", saved.x, inverse, dnormed, into=dmiddle)
        return dmiddle

    def _rotate(self, index: int, q: Tensor, k: Tensor, *, back: bool = False) -> None:
        """In place; back: by the same angles the other way."""
        cos, sin = self._tables[self._config.rotary_table(index)]
        for x in (q, k):
            interleaved = self._config.rotary_interleaved
            self._rowwise.rotate_(x, cos, -sin if back else sin, interleaved=interleaved)

    def _group(self, names: Sequence[str]) -> Group:
        return Group(self._linears, names, self._segments)

    def _back(self, names: Sequence[str], x: Tensor, dy: Tensor) -> Tensor:
        dx = self._group(names).backward(x, dy)
        assert dx is not None, "wants_dx is the default"
        return dx

    # ---- norms

    def _norm(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """In x's type, and the inverse norms (..., 1), float32."""
        return self._rowwise.norm(x, self._scale(name, x), self._config.rms_norm_eps)

    def _norm_at(self, path: str, leaf: str | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """As `_norm`; leaf None: there is no norm, x itself."""
        return (x, None) if leaf is None else self._norm(f"{path}.{leaf}", x)

    def _scale(self, name: str, x: Tensor) -> Tensor:
        """What the norm of x multiplies with."""
        scale = norm_scale(self._config, name, self._linears.weight(name))
        return scale.to(x.dtype) if x.dtype == torch.float32 else scale

    def _norm_back(
        self, name: str, x: Tensor, inverse: Tensor, dy: Tensor, *, into: Tensor
    ) -> None:
        """Adds dx to `into`."""
        slope = norm_slope(self._config, name)
        self._linears.add_norm_gradient(name, x, inverse, dy, slope)
        self._rowwise.norm_gradient(x, inverse, self._scale(name, x), dy, into)

    def _added_back(
        self, path: str, norm: str | None, out: Tensor | None, dadded: Tensor
    ) -> Tensor:
        """The gradient of what a module has put out, from that of what it added to the residual,
        which is kept. out: what entered the norm after it."""
        dout = dadded
        if norm is not None:
            assert out is not None, "kept where there is such a norm"
            dout, name = torch.zeros_like(dadded), f"{path}.{norm}"
            _, inverse = self._norm(name, out)
            self._norm_back(name, out, inverse, dadded.clone(), into=dout)
        scale = self._config.residual_scale
        return dout if scale == 1.0 else dout * scale

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

    def _heads_back(self, path: str, heads: tuple[Tensor, Tensor], dq: Tensor, dk: Tensor) -> None:
        """dq and dk become the gradients of what entered the norms."""
        for leaf, x, grad in zip(("q_norm", "k_norm"), heads, (dq, dk), strict=True):
            name, dy = f"{path}.self_attn.{leaf}", grad.contiguous()
            if self._config.qk_norm_spans_heads:
                x, dy = x.flatten(1), dy.flatten(1)
            dx = torch.zeros_like(dy)
            _, inverse = self._norm(name, x)
            self._norm_back(name, x, inverse, dy, into=dx)
            grad.copy_(dx.view_as(grad))


def qkv_names(path: str) -> tuple[str, str, str]:
    attention = f"{path}.self_attn"
    return f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"


def gate_names(path: str) -> tuple[str, str]:
    return f"{path}.mlp.gate_proj", f"{path}.mlp.up_proj"


def neighbours(num_layers: int) -> list[tuple[str, ...]]:
    """Groups of matrices that read the same rows, for `join_weights`."""
    paths = [f"model.layers.{index}" for index in range(num_layers)]
    return [group for path in paths for group in (qkv_names(path), gate_names(path))]
