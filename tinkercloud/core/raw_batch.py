"""A training request as it came, by protobuf or JSON, before anything in it is checked."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from tinker_gmi.types import Datum as JsonDatum
from tinker_gmi.types import EncodedTextChunk, ModelInput
from tinkercloud.core.types import ProvenanceSpan
from tinkercloud.errors import InvalidRequest


class WireDatum(Protocol):
    """chunks: int32 arrays; anything else is a chunk that is not text, with its `kind`."""

    @property
    def chunks(self) -> Sequence[object]: ...

    @property
    def inputs(self) -> Mapping[str, NDArray[Any]]: ...

    @property
    def model_input_spans(self) -> Sequence[ProvenanceSpan]: ...

    @property
    def loss_fn_input_spans(self) -> Sequence[ProvenanceSpan]: ...


@dataclass(frozen=True, slots=True)
class RawBatch:
    """A forward_backward request as it came, by protobuf or JSON; nothing is checked yet."""

    data: Sequence[WireDatum]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str]
    forward_only: bool = False

    @property
    def num_bytes(self) -> int:
        """About how much there is to check."""
        arrays = [a for d in self.data for a in (*d.chunks, *d.inputs.values())]
        return sum(a.nbytes for a in arrays if isinstance(a, np.ndarray))

    def digest(self) -> bytes:
        """Of all that is asked for, however it was encoded and compressed."""
        config = sorted((name, repr(value)) for name, value in self.loss_fn_config.items())
        digest = hashlib.sha256(repr((self.loss_fn, config, self.forward_only)).encode())
        for datum in self.data:
            spans = [list(datum.model_input_spans), list(datum.loss_fn_input_spans)]
            digest.update(repr((len(datum.chunks), sorted(datum.inputs), spans)).encode())
            for value in (*datum.chunks, *(datum.inputs[name] for name in sorted(datum.inputs))):
                if isinstance(value, np.ndarray):
                    array = cast("NDArray[Any]", value)
                    digest.update(repr((array.dtype.str, array.shape)).encode())
                    digest.update(array.tobytes())
                else:
                    digest.update(repr(value).encode())
        return digest.digest()


@dataclass(frozen=True, slots=True)
class _NotText:
    kind: str


@dataclass(frozen=True, slots=True)
class _PlainDatum:
    chunks: Sequence[object]
    inputs: Mapping[str, NDArray[Any]]
    model_input_spans: Sequence[ProvenanceSpan] = ()  # the JSON form has none
    loss_fn_input_spans: Sequence[ProvenanceSpan] = ()


def raw_datum(datum: JsonDatum) -> WireDatum:
    """The JSON form, in the shape of the protobuf form."""
    inputs = {name: tensor.to_numpy() for name, tensor in datum.loss_fn_inputs.items()}
    return _PlainDatum(chunks_of(datum.model_input), inputs)


def chunks_of(model_input: ModelInput) -> list[object]:
    return [
        _token_ids(chunk.tokens) if isinstance(chunk, EncodedTextChunk) else _NotText(chunk.type)
        for chunk in model_input.chunks
    ]


def _token_ids(tokens: Sequence[int]) -> NDArray[np.int64]:
    try:
        return np.array(tokens, dtype=np.int64)
    except OverflowError:
        raise InvalidRequest("a token id does not fit in 64 bits") from None
