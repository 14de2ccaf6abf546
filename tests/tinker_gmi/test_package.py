"""The package as a whole: its names, its imports, its methods beside the official client's; and the
conversions between types and arrays."""

import asyncio
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import tinker as official
from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results

import tinker_gmi
from tinker_gmi import (
    APIFuture,
    ForwardBackwardOutput,
    SampleResponse,
    SamplingClient,
    ServiceClient,
    TrainingClient,
    conversions,
    types,
)
from tinkercloud.core.types import SampledSequence, SampleOutput, Topk
from tinkercloud.wire import codec

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ["ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient"]
SUBMODULES = {path.stem for path in (ROOT / "tinker_gmi").glob("*")} - {"auth", "types"}


def test_all_lists_exactly_the_public_names() -> None:
    public = {name for name in vars(tinker_gmi) if not name.startswith("_")} - SUBMODULES
    assert public | {"__version__"} == set(tinker_gmi.__all__)


def test_types_lists_exactly_its_public_names() -> None:
    assert {name for name in vars(types) if not name.startswith("_")} == set(types.__all__)


def test_importing_the_sdk_loads_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "fastapi", "sqlite3", "tinker", "yaml")
    code = f"import sys, tinker_gmi; sys.exit(str([m for m in {heavy} if m in sys.modules]))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert run.stderr.strip() == "[]"


@pytest.mark.parametrize("name", CLIENTS)
def test_async_methods_are_coroutines_with_the_arguments_of_their_twins(name: str) -> None:
    members = dict(inspect.getmembers(getattr(tinker_gmi, name), inspect.isfunction))
    twins = [method for method in members if method.endswith("_async")]
    assert twins
    for method in twins:
        assert inspect.iscoroutinefunction(members[method]), method
        twin = inspect.signature(members[method.removesuffix("_async")])
        assert twin.parameters == inspect.signature(members[method]).parameters, method


@pytest.mark.parametrize("name", CLIENTS)
def test_async_methods_have_their_own_name_and_the_documentation_of_their_twins(name: str) -> None:
    client = getattr(tinker_gmi, name)
    for method, function in inspect.getmembers(client, inspect.isfunction):
        if method.endswith("_async"):
            assert function.__name__ == method
            assert function.__qualname__ in {f"{base.__name__}.{method}" for base in client.__mro__}
            assert function.__doc__
            assert function.__doc__ == getattr(client, method.removesuffix("_async")).__doc__


@pytest.mark.parametrize(
    ("method", "twin", "result"),
    [
        (TrainingClient.forward, TrainingClient.forward_async, APIFuture[ForwardBackwardOutput]),
        (SamplingClient.sample, SamplingClient.sample_async, SampleResponse),
        (
            ServiceClient.create_sampling_client,
            ServiceClient.create_sampling_client_async,
            SamplingClient,
        ),
    ],
)
def test_the_signature_of_an_async_method_says_what_awaiting_it_returns(
    method: Callable[..., Any], twin: Callable[..., Any], result: object
) -> None:
    assert inspect.signature(twin).return_annotation == result
    assert get_type_hints(twin) == {**get_type_hints(method), "return": result}


def test_the_async_twin_of_an_overridden_method_calls_the_override() -> None:
    class Fixed(SamplingClient):
        def get_base_model(self) -> str:
            return "overridden"

    client = Fixed.__new__(Fixed)
    assert asyncio.run(client.get_base_model_async()) == "overridden"


def test_errors_form_the_official_tree() -> None:
    for name, ours in vars(tinker_gmi).items():
        if inspect.isclass(ours) and issubclass(ours, Exception):
            parents = [parent.__name__ for parent in getattr(official, name).__mro__]
            assert [p.__name__ for p in ours.__mro__] == parents, name


def test_errors_survive_pickling() -> None:
    category = types.RequestErrorCategory.User
    failed = pickle.loads(pickle.dumps(tinker_gmi.RequestFailedError("m", "r", category)))
    assert (failed.message, failed.request_id, failed.category) == ("m", "r", category)
    status = pickle.loads(pickle.dumps(tinker_gmi.BadRequestError("m", 400, {"detail": "d"})))
    assert (status.status_code, status.body) == (400, {"detail": "d"})


# ---- reduction over the chunks of one call


def test_metrics_are_reduced_as_the_official_client_does() -> None:
    rng = np.random.default_rng(3)
    suffixes = ["sum", "min", "max", "mean", "slack", "hash2", "unique", "new_in_the_future"]
    chunks = []
    for num_datums in (3, 1, 2):
        metrics = {f"m:{suffix}": float(rng.integers(0, 50)) for suffix in suffixes}
        chunks.append((num_datums, metrics | ({"rare:sum": 1.0} if num_datums == 3 else {})))
    ours = conversions.merge_outputs(
        [types.ForwardBackwardOutput(loss_fn_outputs=[{}] * n, metrics=m) for n, m in chunks]
    )
    theirs = combine_fwd_bwd_output_results(
        [
            official.ForwardBackwardOutput(
                loss_fn_output_type="ArrayRecord", loss_fn_outputs=[{}] * n, metrics=m
            )
            for n, m in chunks
        ]
    )
    assert ours.metrics == pytest.approx(theirs.metrics)
    assert "m:unique_2" in ours.metrics
    assert "rare:sum" not in ours.metrics
    assert len(ours.loss_fn_outputs) == 6


def test_a_mean_without_datums_is_the_plain_mean() -> None:
    empty = types.ForwardBackwardOutput(loss_fn_outputs=[], metrics={"a:mean": 1.0})
    other = types.ForwardBackwardOutput(loss_fn_outputs=[], metrics={"a:mean": 3.0})
    assert conversions.merge_outputs([empty, other]).metrics == {"a:mean": 2.0}


# ---- conversions


def test_a_sample_in_json_says_what_the_arrays_say() -> None:
    topk = Topk(np.array([[4, 5], [7, 0], [0, 0]], "i4"), np.full((3, 2), -99999.0, "f4"))
    topk.logprobs[0], topk.logprobs[1, 0] = [-0.5, -1], -0.25
    sequence = SampledSequence(np.array([5], "i4"), np.array([-0.5], "f4"), "stop")
    output = SampleOutput((sequence,), np.array([np.nan, -2], "f4"), topk, np.zeros((1, 2), "f4"))
    sample = conversions.sample_response(output, ["id"])
    assert sample.prompt_logprobs == [None, -2.0]
    assert sample.topk_prompt_logprobs == [[(4, -0.5), (5, -1.0)], [(7, -0.25)], None]
    assert sample.target_prompt_logprobs is not None
    assert sample.target_prompt_logprobs.tolist() == [[0.0, 0.0]]
    assert types.SampleResponse.model_validate(sample.to_json_dict()) == sample
    assert sample.prompt_logprobs_np is not None
    assert np.isnan(sample.prompt_logprobs_np[0])


def test_a_datum_in_json_becomes_arrays() -> None:
    body = types.Datum.model_validate(
        {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": [2, 3], "dtype": "int64"},
                "weights": {"data": [1, 0.5], "dtype": "float32", "shape": [2]},
            },
        }
    )
    datum = conversions.wire_datum(body)
    assert datum.chunks[0].tolist() == [1, 2]
    assert datum.inputs["weights"].tolist() == [1.0, 0.5]


def test_sparse_json_cannot_grow_without_bound() -> None:
    sparse = {
        "data": [],
        "dtype": "float32",
        "shape": [1, 2**20],
        "sparse_crow_indices": [0, 0],
        "sparse_col_indices": [],
    }
    datum: dict[str, Any] = {"model_input": {"chunks": []}, "loss_fn_inputs": {"weights": sparse}}
    body = types.ForwardBackwardInput.model_validate({"data": [datum] * 200, "loss_fn": "ppo"})
    with pytest.raises(codec.WireError, match="too large"):
        conversions.check_sparse_growth(body.data)


def test_a_datum_larger_than_a_request_goes_alone() -> None:
    def datum(length: int) -> codec.WireDatum:
        return codec.WireDatum((np.zeros(length, np.int32),), {})

    data = [datum(1), datum(100), datum(1), datum(1), datum(1)]
    sizes = [len(chunk) for chunk in conversions.split_for_requests(data, 2, 40)]
    assert sizes == [1, 1, 2, 1]
