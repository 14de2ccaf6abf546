"""Provenance spans: which sampled sequence each token of a datum came from (wire specification,
section 7.8), checked against what was recorded when it was sampled.

Axes: N tokens of a datum, P prompt tokens, S sampled tokens of a sequence.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tinkercloud.core.types import ProvenanceSpan, RecordedSequence
from tinkercloud.errors import InvalidRequest

MAX_ID_LENGTH = 256  # characters of a sequence id; ours have about 45


class Annotated(Protocol):
    """A datum with spans; empty: none."""

    @property
    def model_input_spans(self) -> Sequence[ProvenanceSpan]: ...

    @property
    def loss_fn_input_spans(self) -> Sequence[ProvenanceSpan]: ...


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What a datum's spans say of its loss rows. logprobs float32 (N,): of the sampler, 0 where the
    row is no sampled token. mask float32 (N,): 1 where it is one."""

    logprobs: NDArray[np.float32]
    mask: NDArray[np.float32]


def sequence_ids(data: Sequence[Annotated]) -> set[str]:
    """Of all sequences that must be on record for these datums. Empty spans need none."""
    spans = (s for d in data for s in (*d.model_input_spans, *d.loss_fn_input_spans))
    return {span.sequence_id for span in spans if span.length > 0}


def check_spans(where: str, datum: Annotated, num_tokens: int) -> None:
    """Both lists or neither; each tiles the datum's N positions. Raises InvalidRequest."""
    lists = {
        "model_input_spans": datum.model_input_spans,
        "loss_fn_input_spans": datum.loss_fn_input_spans,
    }
    empty = [name for name, spans in lists.items() if not spans]
    if len(empty) == 1:
        raise InvalidRequest(
            f"{where} has no {empty[0]} though it has the other ones; set both lists with "
            "Datum.with_provenance, or neither"
        )
    for name, spans in lists.items():
        for index, span in enumerate(spans):
            _check_span(f"{where}, {name}[{index}]", span)
        total = sum(span.length for span in spans)
        if spans and total != num_tokens:
            raise InvalidRequest(
                f"{where}, {name}: the spans cover {total} positions and there are {num_tokens}; "
                "their lengths must add up to exactly these"
            )


def _check_span(where: str, span: ProvenanceSpan) -> None:
    if not 0 < len(span.sequence_id) <= MAX_ID_LENGTH:
        raise InvalidRequest(
            f"{where} has a sequence_id of {len(span.sequence_id)} characters; it must be that of "
            "a sampled sequence"
        )
    if span.offset < 0 or span.length < 0:
        raise InvalidRequest(
            f"{where} has offset {span.offset} and length {span.length}; neither may be negative"
        )


def sampled_rows(
    where: str,
    datum: Annotated,
    arrays: tuple[NDArray[np.int32], NDArray[np.int64]],
    records: Mapping[str, RecordedSequence],
) -> SampledRows:
    """The spans resolved. arrays: the datum's tokens and its target_tokens, both (N,). records: of
    all `sequence_ids`. `check_spans` has passed. Raises InvalidRequest where a token is not the one
    that was sampled.

    Targets under prompt spans are not compared: they are never trained, and clients put any number
    there (the cookbook's rl_loop: zeros).
    """
    if not datum.model_input_spans:
        raise InvalidRequest(
            f"{where} has no provenance; stable_reinforce needs to know the sampled sequence "
            "behind each token: sample with record_stability_info=True and build the datum with "
            "Datum.with_provenance, or choose another loss"
        )
    tokens, targets = arrays
    for at, span, record in _placed(datum.model_input_spans, records):
        place = f"{where}, model_input"
        _check_equal(place, at, tokens[at], span, _recorded(place, at, span, record))
    logprobs = np.zeros(len(targets), np.float32)
    mask = np.zeros(len(targets), np.float32)
    for at, span, record in _placed(datum.loss_fn_input_spans, records):
        place = f"{where}, target_tokens"
        expected = _recorded(place, at, span, record)
        if span.kind == "sampled":
            _check_equal(place, at, targets[at], span, expected)
            logprobs[at] = record.logprobs[span.offset : span.offset + span.length]
            mask[at] = 1.0
    return SampledRows(logprobs, mask)


def check_advantages(where: str, advantages: NDArray[Any], mask: NDArray[np.float32]) -> None:
    """Only sampled tokens may have one. Raises InvalidRequest."""
    wrong = np.flatnonzero((advantages != 0) & (mask == 0))
    if wrong.size:
        at = int(wrong[0])
        raise InvalidRequest(
            f"{where} has the advantage {float(advantages[at]):g} at position {at}, which is no "
            "sampled token; stable_reinforce takes advantages of sampled tokens only: set it to 0 "
            "(the cookbook: kl_discount_factor=0)"
        )


def _placed(
    spans: Sequence[ProvenanceSpan], records: Mapping[str, RecordedSequence]
) -> Iterator[tuple[slice, ProvenanceSpan, RecordedSequence]]:
    """Each span that covers anything, with its positions and its record."""
    start = 0
    for span in spans:
        stop = start + span.length
        if span.length:
            yield slice(start, stop), span, records[span.sequence_id]
        start = stop


def _recorded(
    where: str, at: slice, span: ProvenanceSpan, record: RecordedSequence
) -> NDArray[np.int32]:
    tokens = record.prompt if span.kind == "prompt" else record.tokens
    stop = span.offset + span.length
    if stop > len(tokens):
        raise InvalidRequest(
            f"{where}, positions {at.start} to {at.stop - 1}: the span asks for tokens "
            f"{span.offset} to {stop - 1} of {_source(span)}, which has {len(tokens)}"
        )
    return tokens[span.offset : stop]


def _check_equal(
    where: str,
    at: slice,
    tokens: NDArray[Any],
    span: ProvenanceSpan,
    recorded: NDArray[np.int32],
) -> None:
    wrong = np.flatnonzero(tokens != recorded)
    if wrong.size:
        first = int(wrong[0])
        raise InvalidRequest(
            f"{where}, position {at.start + first} has token {int(tokens[first])}, but token "
            f"{span.offset + first} of {_source(span)} is {int(recorded[first])}; "
            f"{wrong.size} of the span's {span.length} tokens differ. Train on the tokens as they "
            "were sampled, not on text that was tokenised again"
        )


def _source(span: ProvenanceSpan) -> str:
    what = "the prompt of" if span.kind == "prompt" else "the sampled tokens of"
    return f"{what} sequence {span.sequence_id!r}"
