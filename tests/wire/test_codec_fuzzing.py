"""The decoder of protobuf bodies against messages and bytes that nobody chose: it decodes or raises
WireError, within a bounded time and memory, and what it decodes can be sent again."""

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_data_converter import CONVERTER
from tests.fuzzing import fuzzing
from tests.peak_memory import PeakMemory
from tinkercloud.core.raw_batch import RawBatch
from tinkercloud.core.types import TrainBatch
from tinkercloud.errors import UserError
from tinkercloud.wire import codec
from tinkercloud.wire import tinker_pb2 as pb

FEW, MANY = 150, 20_000
LONGEST_S = 2.0  # of this process alone: others may be computing too
# Sparse tensors may become 2**24 elements whatever the body's size, twice while they are cast.
MOST_BYTES = 2 * 8 * codec.SPARSE_FREE_ELEMENTS + 64 * 1024**2

SIZES = st.one_of(
    st.integers(-2, 4), st.sampled_from([2**14, 2**20, 2**28, 2**31, 2**32, 2**62, 2**63 - 1])
)
INT64S = st.lists(SIZES, max_size=5).map(lambda numbers: np.array(numbers, "<i8").tobytes())
RAW = st.one_of(
    st.binary(max_size=24),
    INT64S,
    st.lists(st.floats(width=32), max_size=6).map(lambda x: np.array(x, "<f4").tobytes()),
)
INT32 = st.integers(-(2**31), 2**31 - 1)
UINT32 = st.one_of(st.integers(0, 3), st.integers(0, 2**32 - 1))
DTYPES = st.sampled_from([0, 1, 2, 3, 4, 5, 2**31 - 1])
TEXTS = st.sampled_from(["", "weights", "target_tokens", "logprobs", "advantages", "x" * 50])
SPANS = st.lists(
    st.one_of(
        st.just(pb.ProvenanceSpan()),
        st.builds(
            lambda text, offset, length: pb.ProvenanceSpan(
                sampled_tokens={"sequence_id": text, "offset": offset, "length": length}
            ),
            *(TEXTS, st.integers(0, 5), st.integers(0, 5)),
        ),
    ),
    max_size=2,
)


@st.composite
def tensors(draw: st.DrawFn) -> pb.Tensor:
    tensor = pb.Tensor(dtype=draw(DTYPES), shape=draw(st.lists(SIZES, max_size=3)))
    match draw(st.integers(0, 2)):
        case 0:
            tensor.dense = draw(RAW)
        case 1:
            parts = draw(RAW), draw(INT64S), draw(INT64S)
            names = ("values", "crow_indices", "col_indices")
            tensor.sparse_csr.CopyFrom(pb.SparseCsr(**dict(zip(names, parts, strict=True))))
    return tensor


@st.composite
def chunks(draw: st.DrawFn) -> pb.Chunk:
    chunk = pb.Chunk()
    if draw(st.booleans()):
        chunk.encoded_text.tokens = draw(RAW)
    return chunk


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    data = [
        pb.Datum(
            model_input=draw(st.lists(chunks(), max_size=3)),
            loss_fn_inputs=draw(st.dictionaries(TEXTS, tensors(), max_size=3)),
            model_input_spans=draw(SPANS),
            loss_fn_input_spans=draw(SPANS),
        )
        for _ in range(draw(st.integers(0, 3)))
    ]
    message = pb.ForwardBackwardRequest(
        model_id=draw(TEXTS),
        seq_id=draw(INT32),
        data=data,
        loss_fn=draw(st.sampled_from(["cross_entropy", "ppo", "gspo", "stable_reinforce", "?"])),
        loss_fn_config=draw(st.dictionaries(TEXTS, st.floats(), max_size=2)),
    )
    return message.SerializeToString()


@st.composite
def train_results(draw: st.DrawFn) -> bytes:
    batches = st.builds(
        lambda data, dtype, offsets, trailing: pb.BatchedTensor(
            data=data, dtype=dtype, offsets=offsets, trailing_shape=trailing
        ),
        *(RAW, DTYPES, INT64S, st.lists(SIZES, max_size=2)),
    )
    records = st.builds(
        lambda fields, count: pb.ArrayRecord(fields=fields, num_datums=count),
        *(st.dictionaries(TEXTS, batches, max_size=2), SIZES),
    )
    return pb.ForwardBackwardOutput(
        loss_fn_outputs=draw(st.lists(records, max_size=3)),
        metrics=draw(st.dictionaries(TEXTS, st.floats(), max_size=2)),
    ).SerializeToString()


@st.composite
def sample_results(draw: st.DrawFn) -> bytes:
    topks = st.builds(
        lambda ids, values, k, length: pb.TopkLogprobs(
            token_ids=ids, logprobs=values, k=k, length=length
        ),
        *(RAW, RAW, UINT32, UINT32),
    )
    message = pb.SampleResponse(prompt_cache_hit_tokens=draw(INT32))
    for _ in range(draw(st.integers(0, 2))):
        sequence = message.sequences.add(tokens=draw(RAW), logprobs=draw(RAW))
        sequence.stop_reason = draw(st.integers(0, 3))
        if draw(st.booleans()):
            sequence.topk_sampled_logprobs.CopyFrom(draw(topks))
    if draw(st.booleans()):
        message.topk_prompt_logprobs.CopyFrom(draw(topks))
    if draw(st.booleans()):
        message.target_prompt_logprobs.CopyFrom(draw(tensors()))
    return message.SerializeToString()


@st.composite
def damaged(draw: st.DrawFn, bodies: st.SearchStrategy[bytes]) -> bytes:
    """A message, or one with bytes written over, inserted or removed."""
    body = draw(bodies)
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(body)))
        end = start + draw(st.integers(0, 4))
        body = body[:start] + draw(st.binary(max_size=4)) + body[end:]
    return body


def convert(request: codec.ForwardBackwardRequest) -> None:
    """What the service does next."""
    raw = RawBatch(request.data, request.loss_fn, request.loss_fn_config, request.forward_only)
    try:
        assert isinstance(CONVERTER.train_batch(raw), TrainBatch)
    except UserError as error:
        assert str(error)


DECODERS: dict[str, tuple[Any, Any, Any]] = {
    "request": (requests(), codec.decode_forward_backward_request, convert),
    "train result": (train_results(), codec.decode_train_output, codec.encode_train_output),
    "sample result": (sample_results(), codec.decode_sample_output, codec.encode_sample_output),
}


@pytest.mark.parametrize("num_examples", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", DECODERS)
def test_whatever_comes_is_decoded_or_refused(kind: str, num_examples: int) -> None:
    bodies, decode, use = DECODERS[kind]
    counts = {"decoded": 0, "refused": 0}
    peak = PeakMemory()

    @fuzzing(num_examples, repeats=num_examples == FEW)
    @given(damaged(bodies))
    def check(body: bytes) -> None:
        begun = time.process_time()
        with peak.measured():
            try:
                value = decode(body)
            except codec.WireError as error:
                assert str(error)
                counts["refused"] += 1
            else:
                use(value)
                counts["decoded"] += 1
        assert time.process_time() - begun < LONGEST_S

    check()
    assert peak.num_bytes < MOST_BYTES
    assert min(counts.values()) > num_examples / 50, counts  # neither side is left out
