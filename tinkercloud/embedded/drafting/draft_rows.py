"""What drafters draw with: the target's own parameters, place by place."""

from tinkercloud.decoding.sampler import RowParams
from tinkercloud.speculative.drafters.drafter import Stream


def row_params(stream: Stream, ahead: int) -> RowParams:
    """What the target draws its token with, so many after the next."""
    s = stream
    position = len(s.tokens) + ahead
    return RowParams(s.temperature, s.top_k, s.top_p, s.seed, s.sample, position)
