"""The cosines and sines of all positions, as every compiled pass reads them."""

import torch
from torch import Tensor

from tinkercloud.architectures.llama import Llama


def rotary_table(architecture: Llama, num_positions: int) -> tuple[Tensor, Tensor]:
    """Those of the first positions, at least as many (P, Dh / 2), float32. Lengths are powers of
    two, so that a vector's width divides them: a position's numbers are the same in every table."""
    positions = torch.arange(1 << max(10, (num_positions - 1).bit_length()))
    return architecture.rotary(positions)
