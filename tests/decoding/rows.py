"""Rows to sample, by the numbers that each is drawn with."""

from tinkercloud.core.types import SamplingParams
from tinkercloud.decoding.sampler import RowParams

NO_CUT = (-1, 1.0)


def row_params(
    temperature: float = 1.0,
    cut: tuple[int, float] = NO_CUT,
    seed: int = 0,
    sample_index: int = 0,
    position: int = 0,
) -> RowParams:
    """cut: top-k and top-p."""
    top_k, top_p = cut
    params = SamplingParams(None, seed, temperature, top_k, top_p)
    return RowParams(params, sample_index, position)
