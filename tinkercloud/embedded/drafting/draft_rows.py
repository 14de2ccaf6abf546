"""What drafters draw with: the target's own parameters, place by place."""

from tinkercloud.decoding.sampler import RowParams
from tinkercloud.speculative.drafters.drafter import Stream


def row_params(stream: Stream, ahead: int) -> RowParams:
    """What the target draws its token with, so many after the next."""
    return RowParams(stream.params, stream.sample_index, len(stream.tokens) + ahead)
