"""How near a compiled kernel's result is to one in float64."""

import torch
from torch import Tensor

PRECISION = {torch.float32: 1e-6, torch.bfloat16: 4e-3}


def assert_near(found: Tensor, expected: Tensor, read_as: torch.dtype = torch.float32) -> None:
    """Up to rounding in a type: the result's own, or that as which products have read numbers."""
    dtype = found.dtype if read_as == torch.float32 else read_as
    error = float((found.double() - expected.double()).abs().max())
    assert error <= PRECISION[dtype] * float(expected.abs().max()) + 1e-9
