"""The wire types: what they accept and send, and that they agree with the official ones."""

import json
import typing
from typing import Any

import numpy as np
import pydantic
import pytest
import tinker as official
import torch

from tinker_gmi import types


def tensor(**fields: Any) -> types.TensorData:
    return types.TensorData.model_validate(fields)


# ---- tensors


def test_a_flat_list_takes_its_shape() -> None:
    dense = tensor(data=[1, 2, 3, 4], dtype="int64", shape=[2, 2])
    assert dense.tolist() == [[1, 2], [3, 4]]
    assert dense.data == [1, 2, 3, 4]
    assert dense.to_numpy().dtype == np.int64


def test_without_a_shape_a_list_is_one_dimensional() -> None:
    assert tensor(data=[1, 2], dtype="float32").shape == [2]


def test_a_sparse_tensor_is_zero_where_nothing_is_listed() -> None:
    sparse = tensor(
        data=[5, 6],
        dtype="float32",
        shape=[2, 3],
        sparse_crow_indices=[0, 1, 2],
        sparse_col_indices=[0, 2],
    )
    assert sparse.tolist() == [[5, 0, 0], [0, 0, 6]]
    assert sparse.data == [5, 6]


@pytest.mark.parametrize(
    "fields",
    [
        {"data": ["1"], "dtype": "int64"},
        {"data": [1.5], "dtype": "int64"},
        {"data": [float("nan")], "dtype": "int64"},
        {"data": [2**63], "dtype": "int64"},
        {"data": [None], "dtype": "float32"},
        {"data": [[1], [1, 2]], "dtype": "int64"},
        {"data": [1, 2], "dtype": "int64", "shape": [3]},
        {"data": [1, 2], "dtype": "int64", "shape": [-2]},
        {"data": [], "dtype": "int64", "shape": [2**62] * 100},
        {"data": [1], "dtype": "int8"},
        {"data": [1], "dtype": "int64", "shape": [1, 1], "sparse_crow_indices": [0, 1]},
        {
            "data": [1],
            "dtype": "int64",
            "shape": [10**9, 10**9],
            "sparse_crow_indices": [0, 1],
            "sparse_col_indices": [0],
        },
        {
            "data": [1],
            "dtype": "int64",
            "shape": [1, 1],
            "sparse_crow_indices": [0, 1],
            "sparse_col_indices": [1],
        },
    ],
)
def test_a_malformed_tensor_is_a_validation_error(fields: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError):
        tensor(**fields)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64])
def test_torch_tensors_convert_both_ways(dtype: torch.dtype) -> None:
    source = torch.tensor([[1, -2], [3, 0]]).to(dtype)
    back = types.TensorData.from_torch(source).to_torch()
    assert back.dtype == (torch.float32 if dtype.is_floating_point else torch.int64)
    assert back.tolist() == source.tolist()


def test_a_tensor_with_a_gradient_can_be_sent() -> None:
    source = torch.tensor([1.0], requires_grad=True)
    assert types.TensorData.from_torch(source).data == [1.0]


@pytest.mark.parametrize("listed", [0, 1, 40, 1600])
def test_sparse_storage_holds_the_same_numbers_and_is_chosen_when_smaller(listed: int) -> None:
    dense = torch.zeros(1600)
    dense[torch.randperm(1600, generator=torch.Generator().manual_seed(1))[:listed]] = 2.5
    sparse = types.TensorData.from_torch_sparse(dense.reshape(40, 40))
    assert sparse.is_sparse == (listed < 1600)
    np.testing.assert_array_equal(sparse.to_numpy(), dense.reshape(40, 40).numpy())
    again = types.TensorData.model_validate_json(json.dumps(sparse.to_json_dict()))
    assert again == sparse


def test_the_json_of_a_tensor_is_the_official_json() -> None:
    from tinker.types._pydantic_types.tensor_data import TensorData as OfficialWire

    ours = types.TensorData.from_numpy(np.array([[1.5, 2], [3, 4]]))
    read = OfficialWire.model_validate(ours.to_json_dict())
    assert (read.data, read.dtype, read.shape) == ([1.5, 2, 3, 4], "float32", [2, 2])
    assert types.TensorData.model_validate(read.model_dump()) == ours


# ---- prompts and datums


def test_chunks_are_distinguished_by_their_type_and_default_to_text() -> None:
    prompt = types.ModelInput.model_validate(
        {
            "chunks": [
                {"tokens": [1, 2]},
                {"type": "image", "data": "aGk=", "format": "png", "expected_tokens": 4},
                {"type": "image_asset_pointer", "location": "x", "format": "jpeg"},
                {"type": "dmel", "dmel": "aGk="},
            ]
        }
    )
    kinds = ["EncodedTextChunk", "ImageChunk", "ImageAssetPointerChunk", "DmelChunk"]
    assert [type(chunk).__name__ for chunk in prompt.chunks] == kinds
    assert prompt.chunks[1].data == b"hi"
    assert prompt.to_json_dict()["chunks"][1]["data"] == "aGk="


@pytest.mark.parametrize(
    "chunk", [{"type": "video"}, {}, 3, {"type": "image", "data": "%%%", "format": "png"}]
)
def test_an_unknown_chunk_is_a_validation_error(chunk: Any) -> None:
    with pytest.raises(pydantic.ValidationError):
        types.ModelInput.model_validate({"chunks": [chunk]})


def test_a_prompt_grows_without_changing_the_old_one() -> None:
    start = types.ModelInput.empty()
    longer = start.append_int(3).append(types.EncodedTextChunk(tokens=[4, 5]))
    assert (start.length, longer.length) == (0, 3)
    assert longer.to_ints() == [3, 4, 5]


def test_a_prompt_with_an_image_has_no_token_ids() -> None:
    image = types.ImageChunk(data=b"x", format="png", expected_tokens=7)
    prompt = types.ModelInput(chunks=[image])
    assert prompt.length == 7
    with pytest.raises(ValueError, match="image"):
        prompt.to_ints()


def test_plain_lists_become_the_dtypes_of_the_specification() -> None:
    lists = {"target_tokens": [1, 2], "weights": [1, 0], "advantages": [1, 2], "mask": [1, 1]}
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs=lists)
    dtypes = {name: value.dtype for name, value in datum.loss_fn_inputs.items()}
    assert dtypes == {
        "target_tokens": "int64",
        "weights": "float32",
        "advantages": "float32",
        "mask": "int64",
    }


def test_two_dimensional_torch_targets_are_sent_sparse_as_the_official_client_does() -> None:
    targets = torch.zeros(64, 8, dtype=torch.int64)
    targets[3, 4] = 9
    inputs = {"target_tokens": targets, "advantages": targets.float()}
    ours = types.Datum(model_input=types.ModelInput.empty(), loss_fn_inputs=inputs)
    theirs = official.Datum(model_input=official.ModelInput.empty(), loss_fn_inputs=inputs)
    for name, value in theirs.loss_fn_inputs.items():
        assert ours.loss_fn_inputs[name].is_sparse == (value.sparse_crow_indices is not None)
        np.testing.assert_array_equal(ours.loss_fn_inputs[name].to_numpy(), value.to_numpy())


# ---- bodies

SHARED = sorted(
    name
    for name in types.__all__
    if isinstance(getattr(types, name), type)
    and issubclass(getattr(types, name), pydantic.BaseModel)
    and hasattr(getattr(official.types, name, None), "model_fields")
)


def test_most_bodies_have_an_official_counterpart() -> None:
    assert len(SHARED) > 35


@pytest.mark.parametrize("name", SHARED)
def test_a_body_has_the_fields_of_the_official_one(name: str) -> None:
    ours = {f.alias or n for n, f in getattr(types, name).model_fields.items()}
    theirs = set(getattr(official.types, name).model_fields)
    if (
        name == "OptimStepRequest"
    ):  # on the wire one of two keys; the official class has a serialiser
        theirs = (theirs - {"optim_params"}) | {"adam_params", "optimizer_params"}
    assert theirs <= ours


@pytest.mark.parametrize("name", SHARED)
def test_a_body_needs_no_field_that_the_official_client_may_leave_out(name: str) -> None:
    theirs = getattr(official.types, name).model_fields
    for field, info in getattr(types, name).model_fields.items():
        if info.is_required() and field in theirs:
            assert theirs[field].is_required(), field


def test_a_checkpoint_path_is_taken_apart() -> None:
    path = types.ParsedCheckpointTinkerPath.from_tinker_path("tinker://a:train:0/sampler_weights/x")
    assert (path.training_run_id, path.checkpoint_type) == ("a:train:0", "sampler")
    assert path.checkpoint_id == "sampler_weights/x"


@pytest.mark.parametrize(
    "path", ["", "x/weights/y", "tinker://a/weights", "tinker://a/b/c", "tinker://a/weights/b/c"]
)
def test_what_is_no_checkpoint_path_is_refused(path: str) -> None:
    with pytest.raises(ValueError):
        types.ParsedCheckpointTinkerPath.from_tinker_path(path)


def test_unknown_fields_are_ignored_and_none_is_not_sent() -> None:
    request = types.CreateModelRequest.model_validate(
        {"session_id": "s", "model_seq_id": 0, "base_model": "m", "new": {"x": 1}}
    )
    assert request.to_json_dict() == {
        "session_id": "s",
        "model_seq_id": 0,
        "base_model": "m",
        "optimizer_config": {"type": "adamw"},
        "type": "create_model",
    }


def test_where_none_means_something_it_is_sent() -> None:
    assert types.SetTtlRequest().to_json_dict() == {"ttl_seconds": None}
    finish = types.FinishSessionRequest(reason=types.FinishReason(type="success"))
    assert finish.to_json_dict()["detail"] is None


@pytest.mark.parametrize("stop", [None, [], "ab", ["a", "b"], [1, 2]])
def test_stop_keeps_its_form(stop: Any) -> None:
    body = json.dumps({"stop": stop, "seed": -(10**30), "temperature": 0})
    params = types.SamplingParams.model_validate_json(body)
    assert params.stop == stop
    assert (params.seed, params.temperature) == (-(10**30), 0.0)


def test_an_unknown_failure_category_reads_as_unknown() -> None:
    assert types.RequestFailedResponse(error="x", category="odd").category == "unknown"


def test_every_public_name_of_types_resolves() -> None:
    for name in types.__all__:
        value = getattr(types, name)
        if isinstance(value, type) and issubclass(value, pydantic.BaseModel):
            typing.get_type_hints(value)
            extra = "allow" if name == "OptimizerConfig" else "ignore"
            assert value.model_config["extra"] == extra, name
