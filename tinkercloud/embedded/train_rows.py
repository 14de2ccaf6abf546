"""The decoder's row-wise parts and their gradients in few passes over memory.

The formulas are those of `architectures.layers`, which tests compare with these.

Axes: ... any leading axes, D the last one, T rows, H heads, Dh head size.
"""

import torch
from torch import Tensor

from tinkercloud.architectures import layers


def norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The root-mean-square norm of x (..., D), and the inverse norms (..., 1), float32.

    In bfloat16 by the steps of `layers.rms_norm`: a last bit more or less of a sum of squares is
    rounded up or down with everything after it, and log-probabilities move by 0.02.
    """
    if x.dtype != torch.float32:
        inverse = x.float().pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        return scaled(x, inverse, weight), inverse
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    inverse = mean_square.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return scaled(x, inverse, weight), inverse


def scaled(x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    """weight * (x * inverse), rounded to x's type before the weight as `layers.rms_norm` does."""
    if x.dtype == torch.float32:
        return (x * inverse).mul_(weight)
    return (x.float() * inverse).to(x.dtype).mul_(weight)


def norm_backward(x: Tensor, inverse: Tensor, weight: Tensor, dy: Tensor, into: Tensor) -> None:
    """Adds to `into` (..., D) the gradient of x; dy may be written over."""
    wide_x = x.float()
    grad = dy.mul_(weight).float()
    # d/dx of x * inverse: inverse * (grad - x * inverse^2 * mean(grad * x))
    dot = (grad * wide_x).sum(-1, keepdim=True)
    along = dot.mul_(inverse.pow(3)).div_(-x.shape[-1])
    if into.dtype == torch.float32:
        into.addcmul_(grad, inverse).addcmul_(wide_x, along)
    else:
        into.add_((grad * inverse).addcmul_(wide_x, along).to(into.dtype))


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """`layers.rotate` in place: x (T, H, Dh), cos and sin (T, Dh / 2)."""
    if x.dtype != torch.float32:
        x.copy_(layers.rotate(x, cos, sin))
        return
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    before = first * cos
    before.addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(before)


def swiglu_backward(gates: Tensor, activated: Tensor, dproduct: Tensor, scratch: Tensor) -> Tensor:
    """Gradient of gates (T, 2 I), gate and up side by side, where product = activated * up and
    activated = silu(gate). `scratch` (T, I) is written over."""
    gate, up = gates.chunk(2, dim=1)
    dgates = torch.empty_like(gates)
    dgate, dup = dgates.chunk(2, dim=1)
    torch.mul(dproduct, activated, out=dup)
    torch.mul(dproduct, up, out=scratch)
    torch.ops.aten.silu_backward.grad_input(scratch, gate, grad_input=dgate)
    return dgates
