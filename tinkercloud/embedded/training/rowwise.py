"""The decoder's row-wise parts and their gradients through PyTorch, for devices without the
compiled pass; `native.train_bindings` has those of the compiled one, by the same names.

The formulas are those of `architectures.layers`, which tests compare with both.

Axes: ... any leading axes, D the last one, T rows, H heads, Dh head size, V vocabulary.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkercloud.architectures import layers


class RowWise(Protocol):
    """What `embedded.training.block` calls: this module, or `native.train_bindings`."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...
    def norm_gradient(
        self, x: Tensor, inverse: Tensor, weight: Tensor, dy: Tensor, into: Tensor
    ) -> None: ...
    def gated(self, activation: str, gates: Tensor) -> Tensor: ...
    def gated_gradient(self, activation: str, gates: Tensor, dproduct: Tensor) -> Tensor: ...
    def rotate_(
        self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
    ) -> None: ...


def norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The root-mean-square norm of x (..., D), in its type, and the inverse norms (..., 1) in
    float32. weight (D,): of x's type or float32.

    In bfloat16 by the steps of `layers.rms_norm`: another order of the sum of squares changes its
    last bit, which rounds everything after it differently.
    """
    if x.dtype != torch.float32:
        inverse = x.float().pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        if weight.dtype != x.dtype:
            return (x.float() * inverse).mul_(weight).to(x.dtype), inverse
        return (x.float() * inverse).to(x.dtype).mul_(weight), inverse
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    inverse = mean_square.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * inverse).mul_(weight), inverse


def norm_gradient(x: Tensor, inverse: Tensor, weight: Tensor, dy: Tensor, into: Tensor) -> None:
    """Adds to `into` (..., D) the gradient of x; dy is overwritten."""
    wide_x = x.float()
    grad = dy.mul_(weight).float()
    # d/dx of x * inverse: inverse * (grad - x * inverse^2 * mean(grad * x))
    dot = (grad * wide_x).sum(-1, keepdim=True)
    along = dot.mul_(inverse.pow(3)).div_(-x.shape[-1])
    if into.dtype == torch.float32:
        into.addcmul_(grad, inverse).addcmul_(wide_x, along)
    else:
        into.add_((grad * inverse).addcmul_(wide_x, along).to(into.dtype))


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> None:
    """`layers.rotate` in place: x (T, H, Dh), its heads side by side; cos and sin (T, R / 2)."""
    x.copy_(layers.rotate(x, cos, sin, interleaved=interleaved))


def gated(activation: str, gates: Tensor) -> Tensor:
    """The activation of gate, times up (T, I), of gates (T, 2 I), gate and up side by side."""
    return layers.gated(activation, *gates.chunk(2, dim=1))


def gated_gradient(activation: str, gates: Tensor, dproduct: Tensor) -> Tensor:
    """The gradient of gates (T, 2 I) from that of their gated product (T, I)."""
    gate, up = gates.chunk(2, dim=1)
    dgates = torch.empty_like(gates)
    dgate, dup = dgates.chunk(2, dim=1)
    back = torch.ops.aten
    if activation == "silu":
        torch.mul(dproduct, F.silu(gate), out=dup)
        back.silu_backward.grad_input(dproduct * up, gate, grad_input=dgate)
    else:
        torch.mul(dproduct, F.gelu(gate, approximate="tanh"), out=dup)
        dgate.copy_(back.gelu_backward(dproduct * up, gate, approximate="tanh"))
    return dgates


def softmax(logits: Tensor, out: Tensor) -> Tensor:
    """Writes the probabilities of logits (T, V) to `out`, float32, which may be the same tensor;
    returns the log of what they were divided by (T,)."""
    wide = logits if logits is out else out.copy_(logits)
    # The log of the largest probability is accurate, since that is never small, and saves the
    # second exponential per entry that logsumexp would take.
    largest = wide.amax(-1)
    torch.softmax(wide, -1, out=out)
    return largest - out.amax(-1).log_()
