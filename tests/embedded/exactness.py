"""What must not depend on who shares a pass: to the bit where products are row-invariant."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tinkercloud.core.types import SampleOutput
from tinkercloud.embedded.forward.row_invariance import is_row_invariant

ROUNDING = 2e-5  # of float32, through a tiny network; relative to the largest number


def assert_same_gradients_in_company(
    alone: Mapping[str, Tensor], together: Mapping[str, Tensor]
) -> None:
    """Float32 gradients by name."""
    assert alone.keys() == together.keys()
    for name, gradient in alone.items():
        limit = 0.0 if is_row_invariant(torch.float32) else ROUNDING * float(gradient.abs().max())
        torch.testing.assert_close(together[name], gradient, rtol=0, atol=limit, msg=name)


def assert_same_samples_in_company(
    alone: SampleOutput, together: SampleOutput, *, is_exact: bool
) -> None:
    """is_exact: whether it was the compiled pass, whose bits never depend on company."""
    limit = 0.0 if is_exact or is_row_invariant(torch.float32) else 1e-4
    for one, other in zip(alone.sequences, together.sequences, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=limit)
