"""The protobuf codec: test vectors, round trips, the official client's own codec, bad bytes."""

import random
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker.proto import tinker_public_pb2 as official_pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)

from tinkercloud.core.types import (
    ProvenanceSpan,
    SampledSequence,
    SampleOutput,
    Topk,
    TrainOutput,
)
from tinkercloud.wire import codec
from tinkercloud.wire import tinker_pb2 as pb

FORWARD_BACKWARD_VECTOR = bytes.fromhex(
    "0a0b41727261795265636f7264123a12360a086c6f6770726f6273122a0a0c000000bf000080be000080bf1218"
    "000000000000000008000000000000000c00000000000000180118021a130a086c6f73733a73756d11"
    "000000000000fc3f"
)
SAMPLE_VECTOR = bytes.fromhex("0a160801120805000000060000001a08cdccccbdcdcc4cbe")


def f32(*numbers: float) -> np.ndarray:
    return np.array(numbers, dtype=np.float32)


def a_request(**changes: Any) -> codec.ForwardBackwardRequest:
    fields: dict[str, Any] = {
        "model_id": "s:train:0",
        "seq_id": 3,
        "data": (
            codec.WireDatum(
                chunks=(np.array([1, 2], np.int32), np.array([3], np.int32)),
                inputs={
                    "target_tokens": np.array([2, 3, 4]),
                    "weights": f32(0, -1.5, 0.25),
                },
            ),
            codec.WireDatum(
                chunks=(np.array([7], np.int32),),
                inputs={"target_tokens": np.array([[5, 6]]), "weights": f32(0.5, 0.5)[None]},
            ),
        ),
        "loss_fn": "ppo",
        "loss_fn_config": {"clip_low_threshold": 0.9, "loss_id": "x"},
        "forward_only": True,
    }
    return codec.ForwardBackwardRequest(**{**fields, **changes})


def a_sample() -> SampleOutput:
    topk = Topk(
        np.array([[4, 5], [0, 0]], np.int32), np.array([[-0.5, -1], [-99999, -99999]], "f4")
    )
    return SampleOutput(
        sequences=(
            SampledSequence(np.array([5, 6], np.int32), f32(-0.1, -0.2), "length", topk),
            SampledSequence(np.array([9], np.int32), f32(-3), "stop"),
        ),
        prompt_logprobs=f32(np.nan, -2),
        topk_prompt_logprobs=topk,
        target_prompt_logprobs=f32(-1, 0)[None],
        prompt_cache_hit_tokens=17,
    )


def official_bytes(data: list[tinker.Datum], config: dict[str, float | str] | None = None) -> bytes:
    request = tinker.types.ForwardBackwardRequest(
        tinker.types.ForwardBackwardInput(data, "cross_entropy", config), "m", 1
    )
    return forward_backward_request_to_proto(request).SerializeToString()


def official_datum(**inputs: Any) -> tinker.Datum:
    return tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)


# ---- vectors of the specification


def test_a_train_output_equals_the_specification_byte_for_byte() -> None:
    output = TrainOutput(
        outputs=({"logprobs": f32(-0.5, -0.25)}, {"logprobs": f32(-1.0)}),
        metrics={"loss:sum": 1.75},
    )
    assert codec.encode_train_output(output) == FORWARD_BACKWARD_VECTOR


def test_the_train_output_of_the_specification_is_read() -> None:
    output = codec.decode_train_output(FORWARD_BACKWARD_VECTOR)
    assert [datum["logprobs"].tolist() for datum in output.outputs] == [[-0.5, -0.25], [-1.0]]
    assert output.metrics == {"loss:sum": 1.75}


def test_a_sample_equals_the_specification_byte_for_byte() -> None:
    sequence = SampledSequence(np.array([5, 6], np.int32), f32(-0.1, -0.2), "length")
    assert codec.encode_sample_output(SampleOutput(sequences=(sequence,))) == SAMPLE_VECTOR


def test_the_sample_of_the_specification_is_read() -> None:
    (sequence,) = codec.decode_sample_output(SAMPLE_VECTOR).sequences
    assert sequence.tokens.tolist() == [5, 6]
    assert sequence.logprobs.tolist() == f32(-0.1, -0.2).tolist()
    assert sequence.stop_reason == "length"


# ---- round trips


def test_a_request_survives_the_round_trip() -> None:
    request = a_request()
    back = codec.decode_forward_backward_request(codec.encode_forward_backward_request(request))
    assert (back.model_id, back.seq_id, back.loss_fn) == ("s:train:0", 3, "ppo")
    assert back.loss_fn_config == request.loss_fn_config
    assert back.forward_only
    for sent, received in zip(request.data, back.data, strict=True):
        assert [c.tolist() for c in received.chunks] == [c.tolist() for c in sent.chunks]
        assert all(chunk.dtype == np.int32 for chunk in received.chunks)
        for name, array in sent.inputs.items():
            np.testing.assert_array_equal(received.inputs[name], array)
            assert received.inputs[name].dtype == array.dtype


def test_ragged_trailing_shapes_keep_the_order_of_the_datums() -> None:
    shapes = [(2,), (3,), (2, 4), (1, 4), (2, 3), (5,)]
    outputs = tuple(
        {"logprobs": np.random.default_rng(i).random(shape, np.float32), "other": f32(i)}
        for i, shape in enumerate(shapes)
    )
    body = codec.encode_train_output(TrainOutput(outputs=outputs, metrics={}))
    assert len(pb.ForwardBackwardOutput.FromString(body).loss_fn_outputs) == 4
    back = codec.decode_train_output(body)
    for sent, received in zip(outputs, back.outputs, strict=True):
        np.testing.assert_array_equal(received["logprobs"], sent["logprobs"])
        np.testing.assert_array_equal(received["other"], sent["other"])


def test_datums_with_different_fields_are_our_mistake() -> None:
    outputs = ({"logprobs": f32(1)}, {"logprobs": f32(1), "elementwise_loss": f32(1)})
    with pytest.raises(codec.WireError, match="same fields"):
        codec.encode_train_output(TrainOutput(outputs=outputs, metrics={}))


def test_an_output_without_datums_keeps_its_metrics() -> None:
    body = codec.encode_train_output(TrainOutput(outputs=(), metrics={"loss:sum": float("nan")}))
    back = codec.decode_train_output(body)
    assert back.outputs == ()
    assert np.isnan(back.metrics["loss:sum"])


def test_a_sample_survives_the_round_trip() -> None:
    sent = a_sample()
    back = codec.decode_sample_output(codec.encode_sample_output(sent))
    assert [s.tokens.tolist() for s in back.sequences] == [[5, 6], [9]]
    assert [s.stop_reason for s in back.sequences] == ["length", "stop"]
    assert back.sequences[1].topk is None
    np.testing.assert_array_equal(back.prompt_logprobs, sent.prompt_logprobs)
    np.testing.assert_array_equal(back.target_prompt_logprobs, sent.target_prompt_logprobs)
    for topk in (back.topk_prompt_logprobs, back.sequences[0].topk):
        np.testing.assert_array_equal(topk.token_ids, sent.topk_prompt_logprobs.token_ids)
        np.testing.assert_array_equal(topk.logprobs, sent.topk_prompt_logprobs.logprobs)
    assert back.prompt_cache_hit_tokens == 17


def test_absent_parts_of_a_sample_stay_absent() -> None:
    sequence = SampledSequence(np.array([1], np.int32), f32(-1), "stop")
    back = codec.decode_sample_output(
        codec.encode_sample_output(SampleOutput(sequences=(sequence,)))
    )
    assert back.prompt_logprobs is None
    assert back.topk_prompt_logprobs is None
    assert back.target_prompt_logprobs is None


# ---- against the official client


def test_the_schemas_have_the_same_fields_with_the_same_numbers_and_types() -> None:
    def fields(message: Any) -> set[tuple[Any, ...]]:
        return {(f.number, f.name, f.type, f.is_repeated) for f in message.DESCRIPTOR.fields}

    names = [
        *("ForwardBackwardRequest", "LossConfigValue", "Datum", "Chunk", "EncodedTextChunk"),
        *("ImageChunk", "DmelChunk", "Tensor", "SparseCsr", "ForwardBackwardOutput"),
        *("ArrayRecord", "BatchedTensor", "SampleResponse", "SampledSequence"),
        *("TopkLogprobs", "PromptAltTokens", "ProvenanceSpan"),
    ]
    for name in names:
        assert fields(getattr(pb, name)) == fields(getattr(official_pb, name)), name


@pytest.mark.parametrize("weights", [[0.0, 1.5, -1.0], np.array([0.0, 1.5, -1.0])])
def test_dense_inputs_of_the_official_client_are_read(weights: Any) -> None:
    datum = official_datum(target_tokens=[4, 5, 6], weights=weights)
    (got,) = codec.decode_forward_backward_request(official_bytes([datum])).data
    assert got.chunks[0].tolist() == [1, 2, 3]
    assert got.inputs["target_tokens"].tolist() == [4, 5, 6]
    assert got.inputs["target_tokens"].dtype == np.int64
    assert got.inputs["weights"].tolist() == [0.0, 1.5, -1.0]
    assert got.inputs["weights"].dtype == np.float32


def test_two_dimensional_inputs_of_the_official_client_are_read() -> None:
    targets = np.arange(6).reshape(3, 2)
    datum = official_datum(target_tokens=targets, weights=targets.astype(np.float32) / 7)
    (got,) = codec.decode_forward_backward_request(official_bytes([datum])).data
    np.testing.assert_array_equal(got.inputs["target_tokens"], targets)
    np.testing.assert_array_equal(got.inputs["weights"], (targets / 7).astype(np.float32))


def test_sparse_inputs_of_the_official_client_are_made_dense() -> None:
    targets = torch.zeros(64, 8, dtype=torch.int64)
    targets[3, 1], targets[3, 7], targets[63, 0] = 11, 12, 13
    weights = targets.float() / 4
    datum = official_datum(target_tokens=targets, weights=weights)
    body = official_bytes([datum])
    sent = pb.ForwardBackwardRequest.FromString(body).data[0].loss_fn_inputs
    assert {tensor.WhichOneof("encoding") for tensor in sent.values()} == {"sparse_csr"}
    (got,) = codec.decode_forward_backward_request(body).data
    np.testing.assert_array_equal(got.inputs["target_tokens"], targets.numpy())
    np.testing.assert_array_equal(got.inputs["weights"], weights.numpy())


def test_the_loss_config_of_the_official_client_is_read_with_texts() -> None:
    body = official_bytes([official_datum(target_tokens=[1, 2, 3])], {"a": 0.5, "b": "text"})
    assert codec.decode_forward_backward_request(body).loss_fn_config == {"a": 0.5, "b": "text"}


def test_a_legacy_loss_config_is_read() -> None:
    body = pb.ForwardBackwardRequest(loss_fn_config={"beta": 0.05}).SerializeToString()
    assert codec.decode_forward_backward_request(body).loss_fn_config == {"beta": 0.05}


def test_an_image_is_reported_as_unsupported_and_not_dropped() -> None:
    image = tinker.types.ImageChunk(data=b"png", format="png", expected_tokens=4)
    text = tinker.types.EncodedTextChunk(tokens=[1])
    datum = tinker.Datum(
        model_input=tinker.ModelInput(chunks=[text, image]), loss_fn_inputs={"weights": [1.0]}
    )
    (got,) = codec.decode_forward_backward_request(official_bytes([datum])).data
    assert got.chunks[1] == codec.UnsupportedChunk("image")


def test_the_official_client_reads_our_request() -> None:
    message = official_pb.ForwardBackwardRequest.FromString(
        codec.encode_forward_backward_request(a_request())
    )
    assert (message.model_id, message.seq_id, message.forward_only) == ("s:train:0", 3, True)
    assert message.loss_fn_config_v2["loss_id"].text == "x"
    assert dict(message.loss_fn_config) == {"clip_low_threshold": 0.9}
    tensor = message.data[1].loss_fn_inputs["target_tokens"]
    assert list(tensor.shape) == [1, 2]
    assert np.frombuffer(tensor.dense, np.int64).tolist() == [5, 6]


def test_the_official_client_reads_our_train_output() -> None:
    outputs = (
        {"logprobs": f32(-1, -2), "elementwise_loss": f32(1, 2)},
        {"logprobs": np.ones((2, 3), np.float32), "elementwise_loss": np.zeros((2, 3), "f4")},
    )
    body = codec.encode_train_output(TrainOutput(outputs, {"loss:sum": 3.0}))
    got = deserialize_forward_backward_output(body)
    assert got.loss_fn_output_type == "ArrayRecord"
    assert got.metrics == {"loss:sum": 3.0}
    for sent, received in zip(outputs, got.loss_fn_outputs, strict=True):
        for name, array in sent.items():
            np.testing.assert_array_equal(received[name].to_numpy(), array)


def test_the_official_client_reads_our_sample() -> None:
    sent = a_sample()
    got = deserialize_sample_response(codec.encode_sample_output(sent))
    assert [s.tokens for s in got.sequences] == [[5, 6], [9]]
    assert [s.stop_reason for s in got.sequences] == ["length", "stop"]
    assert got.sequences[1].logprobs == [-3.0]
    assert got.prompt_logprobs == [None, -2.0]
    assert got.topk_prompt_logprobs == [[(4, -0.5), (5, -1.0)], None]
    assert got.target_prompt_logprobs.tolist() == [[-1.0, 0.0]]
    assert got.prompt_cache_hit_tokens == 17


def test_int32_and_bfloat16_are_widened() -> None:
    tensor = pb.Tensor(dtype=pb.DTYPE_INT32, dense=np.array([-5, 6], "<i4").tobytes())
    half = pb.Tensor(dtype=pb.DTYPE_BFLOAT16, dense=np.array([0x3FC0, 0xBF80], "<u2").tobytes())
    message = pb.ForwardBackwardRequest(data=[pb.Datum(loss_fn_inputs={"a": tensor, "b": half})])
    (got,) = codec.decode_forward_backward_request(message.SerializeToString()).data
    assert got.inputs["a"].tolist() == [-5, 6]
    assert got.inputs["a"].dtype == np.int64
    assert got.inputs["b"].tolist() == [1.5, -1.0]
    assert got.inputs["b"].dtype == np.float32


# ---- malformed input


def body_with(tensor: pb.Tensor, copies: int = 1) -> bytes:
    datum = pb.Datum(loss_fn_inputs={"weights": tensor})
    return pb.ForwardBackwardRequest(data=[datum] * copies).SerializeToString()


def csr(crow: list[int], col: list[int], shape: list[int], num_values: int) -> pb.Tensor:
    return pb.Tensor(
        dtype=pb.DTYPE_FLOAT32,
        shape=shape,
        sparse_csr=pb.SparseCsr(
            values=np.ones(num_values, "<f4").tobytes(),
            crow_indices=np.array(crow, "<i8").tobytes(),
            col_indices=np.array(col, "<i8").tobytes(),
        ),
    )


def dense(num_bytes: int, shape: list[int], dtype: int = pb.DTYPE_FLOAT32) -> pb.Tensor:
    return pb.Tensor(dtype=dtype, dense=bytes(num_bytes), shape=shape)


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (dense(7, []), "whole number"),
        (dense(8, [3]), "do not fill"),
        (dense(8, [-2]), "outside"),
        (dense(8, [2**62, 4]), "outside"),
        (dense(0, [0, 2**62]), "outside"),
        (dense(8, [1] * 9), "axes"),
        (dense(8, [2], pb.DTYPE_UNSPECIFIED), "dtype"),
        (csr([0, 1], [0], [10**9, 10**9], 1), "outside"),
        (csr([0, 1], [0], [2**14, 2**15], 1), "exceeds"),
        (csr([0, 1], [0], [1], 1), "two sizes"),
        (csr([0, 2, 1], [0, 0], [2, 2], 2), "crow_indices"),
        (csr([0, 2, 1, 2], [0, 0], [3, 2], 2), "decrease"),
        (csr([0, 2**63 - 1, -(2**63), 2], [0, 0], [3, 2], 2), "lie in"),
        (csr([1, 2], [0, 0], [1, 2], 2), "crow_indices"),
        (csr([0, 1], [2], [1, 2], 1), "column index"),
        (csr([0, 1], [-1], [1, 2], 1), "column index"),
        (csr([0, 2], [0], [1, 2], 2), "col_indices"),
        (csr([], [], [0, 0], 0), "crow_indices"),
    ],
)
def test_a_malformed_tensor_is_refused_by_name(tensor: pb.Tensor, text: str) -> None:
    with pytest.raises(codec.WireError, match=text) as caught:
        codec.decode_forward_backward_request(body_with(tensor))
    assert "datum 0" in str(caught.value)
    assert "'weights'" in str(caught.value)


def test_many_small_sparse_tensors_cannot_grow_without_bound() -> None:
    body = body_with(csr([0, 0], [], [1, 2**20], 0), copies=2000)
    with pytest.raises(codec.WireError, match="too large when made dense"):
        codec.decode_forward_backward_request(body)


def test_too_many_datums_are_refused() -> None:
    body = pb.ForwardBackwardRequest(data=[pb.Datum()] * (codec.MAX_DATUMS + 1))
    with pytest.raises(codec.WireError, match="at most"):
        codec.decode_forward_backward_request(body.SerializeToString())


def test_a_loss_option_without_a_value_is_refused() -> None:
    message = pb.ForwardBackwardRequest(loss_fn_config_v2={"beta": pb.LossConfigValue()})
    with pytest.raises(codec.WireError, match="beta"):
        codec.decode_forward_backward_request(message.SerializeToString())


def test_a_sequence_number_beyond_32_bits_cannot_be_sent() -> None:
    with pytest.raises(codec.WireError):
        codec.encode_forward_backward_request(a_request(seq_id=2**31))


@pytest.mark.parametrize(
    "batch",
    [
        {"offsets": [0, 4]},
        {"offsets": [0, 12, 8]},
        {"offsets": [4, 8]},
        {"offsets": [0, -(2**63), 8]},
        {"offsets": []},
        {"offsets": [0, 6, 8]},
        {"offsets": [0, 4, 8], "trailing_shape": [2]},
        {"offsets": [0, 8], "trailing_shape": [0]},
        {"offsets": [0, 8], "trailing_shape": [-1]},
    ],
)
def test_a_malformed_batch_is_refused(batch: dict[str, Any]) -> None:
    field = pb.BatchedTensor(
        data=np.ones(2, "<f4").tobytes(),
        dtype=pb.DTYPE_FLOAT32,
        offsets=np.array(batch["offsets"], "<i8").tobytes(),
        trailing_shape=batch.get("trailing_shape", []),
    )
    record = pb.ArrayRecord(fields={"logprobs": field}, num_datums=len(batch["offsets"]) - 1)
    with pytest.raises(codec.WireError):
        codec.decode_train_output(
            pb.ForwardBackwardOutput(loss_fn_outputs=[record]).SerializeToString()
        )


def test_a_record_whose_count_disagrees_with_its_fields_is_refused() -> None:
    record = pb.ForwardBackwardOutput.FromString(FORWARD_BACKWARD_VECTOR)
    record.loss_fn_outputs[0].num_datums = 2**40
    with pytest.raises(codec.WireError, match="datums"):
        codec.decode_train_output(record.SerializeToString())


def test_sampled_tokens_and_logprobs_of_different_length_are_refused() -> None:
    message = pb.SampleResponse.FromString(SAMPLE_VECTOR)
    message.sequences[0].logprobs = bytes(4)
    with pytest.raises(codec.WireError, match="logprobs"):
        codec.decode_sample_output(message.SerializeToString())


DECODERS = {
    # Messages that follow each other merge: a third datum, with a sparse tensor.
    codec.decode_forward_backward_request: lambda: (
        codec.encode_forward_backward_request(a_request())
        + body_with(csr([0, 1, 3], [0, 1, 3], [2, 4], 3))
    ),
    codec.decode_train_output: lambda: FORWARD_BACKWARD_VECTOR,
    codec.decode_sample_output: lambda: codec.encode_sample_output(a_sample()),
}


def mutated(rng: random.Random, body: bytes) -> bytes:
    """One to four bytes changed, removed or inserted, or the tail cut off."""
    out = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(out))
        choice = rng.randrange(4)
        if choice == 0:
            out[place] = rng.randrange(256)
        elif choice == 1 and len(out) > 1:
            del out[place]
        elif choice == 2:
            out.insert(place, rng.randrange(256))
        elif place > 0:
            del out[place:]
    return bytes(out)


@pytest.mark.parametrize("decode", DECODERS, ids=lambda decode: decode.__name__)
def test_damaged_and_random_bytes_raise_nothing_but_wire_errors(decode: Any) -> None:
    rng = random.Random(7)
    valid = DECODERS[decode]()
    bodies = [mutated(rng, valid) for _ in range(3000)]
    bodies += [rng.randbytes(rng.randint(1, 60)) for _ in range(1000)]
    refused = 0
    for body in bodies:
        try:
            decode(body)
        except codec.WireError:
            refused += 1
    assert refused > 1000


def test_every_truncation_of_a_request_is_refused_or_read_as_a_shorter_one() -> None:
    body = codec.encode_forward_backward_request(a_request())
    for length in range(len(body)):
        try:
            shorter = codec.decode_forward_backward_request(body[:length])
        except codec.WireError:
            continue
        assert len(shorter.data) <= 2


# ---- provenance spans


def test_provenance_of_the_official_client_is_decoded() -> None:
    datum = official_datum(target_tokens=[2, 3, 4], weights=[1.0, 1.0, 1.0]).with_provenance(
        model_input=[
            tinker.PromptProvenanceSpan(sequence_id="q:0", length=2),
            tinker.SampledProvenanceSpan(sequence_id="q:0", length=1),
            tinker.SampledProvenanceSpan(sequence_id="q:1", length=0),
        ],
        loss_fn_inputs=[tinker.SampledProvenanceSpan(sequence_id="q:0", offset=2**40, length=3)],
    )
    [decoded] = codec.decode_forward_backward_request(official_bytes([datum])).data
    assert decoded.model_input_spans == (
        ProvenanceSpan("prompt", "q:0", 0, 2),
        ProvenanceSpan("sampled", "q:0", 0, 1),
        ProvenanceSpan("sampled", "q:1", 0, 0),
    )
    assert decoded.loss_fn_input_spans == (ProvenanceSpan("sampled", "q:0", 2**40, 3),)
    [again] = codec.decode_forward_backward_request(
        codec.encode_forward_backward_request(a_request(data=(decoded,)))
    ).data
    assert again.model_input_spans == decoded.model_input_spans
    assert again.loss_fn_input_spans == decoded.loss_fn_input_spans


def test_a_span_without_a_source_is_no_request() -> None:
    message = pb.ForwardBackwardRequest()
    message.data.add().loss_fn_input_spans.add()
    with pytest.raises(codec.WireError, match=r"datum 0.*neither prompt_tokens"):
        codec.decode_forward_backward_request(message.SerializeToString())


def test_the_number_of_spans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_PARTS", 10)
    message = pb.ForwardBackwardRequest()
    datum = message.data.add()
    for _ in range(11):
        datum.model_input_spans.add().prompt_tokens.length = 0
    with pytest.raises(codec.WireError, match="11 chunks, tensors and spans"):
        codec.decode_forward_backward_request(message.SerializeToString())
