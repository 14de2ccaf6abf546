"""Where the tokens of a datum come from: runs of prompts and samples (specification 7.8)."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from tinker_gmi.bodies.wire_model import WireModel


class _Span(WireModel):
    sequence_id: str = Field(min_length=1)
    offset: int = Field(default=0, ge=0)
    length: int = Field(ge=0)


class PromptProvenanceSpan(_Span):
    """`length` tokens from position `offset` of the prompt of the sample that named its sequence
    sequence_id."""

    type: Literal["prompt"] = "prompt"


class SampledProvenanceSpan(_Span):
    """`length` tokens from position `offset` of the sampled sequence sequence_id."""

    type: Literal["sampled"] = "sampled"


ProvenanceSpan = Annotated[
    PromptProvenanceSpan | SampledProvenanceSpan, Field(discriminator="type")
]
ProvenanceSpans = list[ProvenanceSpan]
"""Consecutive runs that tile one field of a datum."""


def check_tiling(field: str, spans: Sequence[_Span], length: int) -> None:
    """Raises ValueError where the spans do not cover the `length` positions of the field."""
    covered = sum(span.length for span in spans)
    if covered != length:
        raise ValueError(f"the spans of {field} cover {covered} positions of its {length}")
