"""Provenance spans of datums in protobuf (wire specification, section 6.1)."""

from collections.abc import Iterable
from typing import Any

from tinkercloud.core.types import ProvenanceSpan
from tinkercloud.wire import tinker_pb2 as pb
from tinkercloud.wire.arrays import WireError


def num_spans(datum: "pb.Datum") -> int:
    return len(datum.model_input_spans) + len(datum.loss_fn_input_spans)


def decode_spans(messages: "Iterable[pb.ProvenanceSpan]") -> tuple[ProvenanceSpan, ...]:
    """Their numbers are not checked here. Raises WireError for a span without a source."""
    return tuple(_decode_span(message) for message in messages)


def _decode_span(message: "pb.ProvenanceSpan") -> ProvenanceSpan:
    match message.WhichOneof("source"):
        case "prompt_tokens":
            run = message.prompt_tokens
            return ProvenanceSpan("prompt", run.sequence_id, run.offset, run.length)
        case "sampled_tokens":
            run = message.sampled_tokens
            return ProvenanceSpan("sampled", run.sequence_id, run.offset, run.length)
        case _:
            raise WireError("a span has neither prompt_tokens nor sampled_tokens")


def write_spans(into: Any, spans: Iterable[ProvenanceSpan]) -> None:
    """into: a repeated field of ProvenanceSpan messages."""
    for span in spans:
        message = into.add()
        run = message.prompt_tokens if span.kind == "prompt" else message.sampled_tokens
        run.sequence_id, run.offset, run.length = span.sequence_id, span.offset, span.length
