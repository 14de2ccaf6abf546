"""The row-wise parts that a device trains with: Triton kernels where they run and are right, else
PyTorch."""

from functools import cache

import torch
from torch import Tensor

from tinkercloud.embedded.forward.kernel_choice import are_usable
from tinkercloud.embedded.training import rowwise
from tinkercloud.embedded.training.rowwise import RowWise


@cache
def rowwise_for(device: torch.device, dtype: torch.dtype) -> RowWise:
    """The kernels are compared with PyTorch on the device before their first use."""
    if not are_usable("training", device, dtype, differences):
        return rowwise
    from tinkercloud.embedded.training import rowwise_kernels

    return rowwise_kernels


def differences(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Between the kernels and PyTorch: the largest, as a fraction of the largest number."""
    from tinkercloud.embedded.training import rowwise_kernels

    ours, theirs = _results(rowwise_kernels, device, dtype), _results(rowwise, device, dtype)
    return {
        name: float((ours[name].float() - right.float()).abs().max() / right.float().abs().max())
        for name, right in theirs.items()
    }


def _results(parts: RowWise, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Each part's, of the same random numbers."""
    generator, found = torch.Generator().manual_seed(6), {}

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    side_by_side = random(5, 9 * 24)
    heads = side_by_side[:, : 6 * 24].unflatten(1, (6, 24))
    for name, x in (("rows", random(5, 40)), ("heads", heads)):
        for weight in (random(x.shape[-1]), random(x.shape[-1]).float()):
            kind = f"{name}, {weight.dtype}"
            normed, inverse = parts.norm(x, weight, 1e-5)
            into = random(*x.shape)
            parts.norm_gradient(x, inverse, weight, random(*x.shape), into)
            found |= {f"norm of {kind}": normed, f"its gradient, {kind}": into}
    angles = random(5, 12).float()
    parts.rotate_(heads, angles.cos(), angles.sin())
    gates = random(5, 2 * 70)
    found |= {
        "rotation": side_by_side,
        "gated": parts.gated("silu", gates),
        "its gradient": parts.gated_gradient("silu", gates, random(5, 70)),
    }
    return found
