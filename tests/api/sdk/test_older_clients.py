"""What SDKs up to 0.25 send and read, told apart by their headers and bodies."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.api.harness import Api, serving, wire_datum
from tinkercloud.wire.codec import encode_train_output

JSON_ONLY = {"Accept": "application/json"}  # of every request of an SDK up to 0.18.0
TOKENS = [1, 2, 3, 4]


async def json_result(api: Api, accepted: dict[str, Any], **headers: str) -> Any:
    await api.result(accepted)  # finished
    response = await api.retrieve(accepted["request_id"], **(headers or JSON_ONLY))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return json.loads(response.content, parse_constant=pytest.fail)


def older_batch(**inputs: Any) -> dict[str, Any]:
    """A batch of one datum in the JSON form of SDKs up to 0.24."""
    tensors = {
        "target_tokens": {"data": [2, 3, 4, 5], "dtype": "int64", "shape": [4]},
        **inputs,
    }
    chunk = {"type": "encoded_text", "tokens": TOKENS}
    datum = {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": tensors}
    return {"data": [datum], "loss_fn": "cross_entropy"}


async def test_a_training_result_is_json_for_a_client_that_accepts_no_protobuf(api: Api) -> None:
    accepted = await api.forward_backward(await api.model(), 1)
    view = await json_result(api, accepted)
    output = await api.result(accepted)
    assert view["loss_fn_output_type"] == "ArrayRecord"
    assert view["metrics"] == dict(output.metrics)
    [fields] = view["loss_fn_outputs"]
    assert fields["logprobs"]["dtype"] == "float32"
    assert fields["logprobs"]["shape"] == [4]
    assert fields["logprobs"]["data"] == output.outputs[0]["logprobs"].tolist()


async def test_a_sample_is_json_with_null_where_the_prompt_is_not_scored(api: Api) -> None:
    sampler = await api.sampler(await api.session())
    accepted = await api.sample(sampler, prompt_logprobs=True, topk_prompt_logprobs=2)
    view = await json_result(api, accepted)
    output = await api.result(accepted)
    [sequence] = view["sequences"]
    assert sequence["tokens"] == output.sequences[0].tokens.tolist()
    assert sequence["logprobs"] == output.sequences[0].logprobs.tolist()
    assert sequence["stop_reason"] in ("stop", "length")
    assert view["prompt_logprobs"][0] is None
    assert view["prompt_logprobs"][1:] == output.prompt_logprobs[1:].tolist()
    assert view["topk_prompt_logprobs"][0] is None
    assert [len(row) for row in view["topk_prompt_logprobs"][1:]] == [2, 2]


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("application/x-protobuf", "application/x-protobuf"),
        ("application/json, Application/X-Protobuf;q=0.5", "application/x-protobuf"),
        ("application/*", "application/x-protobuf"),
        ("*/*", "application/x-protobuf"),
        ("application/json", "application/json"),
        ("text/plain, application/json", "application/json"),
    ],
)
async def test_the_accept_header_chooses_the_form(api: Api, accept: str, content_type: str) -> None:
    accepted = await api.forward_backward(await api.model(), 1)
    await api.result(accepted)
    response = await api.retrieve(accepted["request_id"], Accept=accept)
    assert response.headers["content-type"] == content_type


async def test_a_failure_is_the_same_for_every_client(api: Api) -> None:
    accepted = await api.forward_backward(await api.model(), 1, loss_fn="nonsense")
    assert await json_result(api, accepted) == await api.result(accepted)


async def test_numbers_that_json_lacks_fail_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_nan(output: Any) -> bytes:
        return encode_train_output(
            type(output)(
                ({"logprobs": np.array([-1.0, np.nan], np.float32)},), {"loss:sum": math.nan}
            )
        )

    monkeypatch.setattr(
        "tinkercloud.services.recovery.training_outcomes.encode_train_output", with_nan
    )
    async with serving(tmp_path) as api:
        accepted = await api.forward_backward(await api.model(), 1)
        view = await json_result(api, accepted)
        assert view["category"] == "user"
        assert "lower the learning rate" in view["error"]
        assert math.isnan((await api.result(accepted)).metrics["loss:sum"])


async def test_json_bodies_train_as_protobuf_ones_do(api: Api) -> None:
    older, newer = (
        await api.model(lora_config={"seed": 1}),
        await api.model(lora_config={"seed": 1}),
    )
    ones = {"weights": {"data": [1.0] * 4, "dtype": "float32", "shape": [4]}}
    forward = await api.ok("forward", model_id=older, seq_id=1, forward_input=older_batch(**ones))
    trained = await api.ok(
        "forward_backward", model_id=older, seq_id=2, forward_backward_input=older_batch(**ones)
    )
    views = [await json_result(api, accepted) for accepted in (forward, trained)]
    assert views[0] == views[1]
    output = await api.result(await api.forward_backward(newer, 1))
    assert views[0]["metrics"]["loss:sum"] == output.metrics["loss:sum"]
    norms = [
        (await api.result(await api.optim_step(model, number)))["metrics"]
        for model, number in ((older, 3), (newer, 2))
    ]
    assert norms[0] == norms[1]


async def test_weights_may_be_left_out_of_both_forms(api: Api) -> None:
    model_id = await api.model()
    plain = await api.forward_backward(model_id, 1, forward_only=True)
    without = await api.forward_backward(model_id, 2, [wire_datum(weights=0)], forward_only=True)
    older = await api.ok("forward", model_id=model_id, seq_id=3, forward_input=older_batch())
    losses = [(await api.result(a)).metrics["loss:sum"] for a in (plain, without, older)]
    assert losses[0] == losses[1] == losses[2] > 0


async def test_weights_of_zero_take_a_token_out_of_a_policy_gradient(api: Api) -> None:
    model_id = await api.model()

    async def loss(seq_id: int, **inputs: Any) -> float:
        data = [wire_datum(logprobs=np.full(4, -1.0), **inputs)]
        accepted = await api.forward_backward(
            model_id, seq_id, data, "importance_sampling", forward_only=True
        )
        return (await api.result(accepted)).metrics["loss:sum"]

    masked = await loss(1, advantages=np.ones(4), weights=[0.0, 1.0, 1.0, 0.5])
    scaled = await loss(2, advantages=np.array([0.0, 1.0, 1.0, 0.5]), weights=0)
    plain = await loss(3, advantages=np.ones(4), weights=0)
    assert masked == scaled != plain


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/api/v1/novel_call"), ("DELETE", "/api/v1/optim_step")]
)
async def test_a_call_that_is_not_here_is_refused_with_where_to_look(
    api: Api, method: str, path: str
) -> None:
    refused = await api.http.request(method, path)
    assert refused.status_code in (404, 405)
    assert f"no {method} {path}" in refused.json()["detail"]
    assert "docs/move.md" in refused.json()["detail"]


async def test_the_oldest_bodies_open_a_session_and_a_model(api: Api) -> None:
    """The fields that 0.7 sends, and one that no version knows."""
    session = await api.ok(
        "create_session", tags=[], user_metadata={}, sdk_version="0.7.0", type="create_session"
    )
    accepted = await api.ok(
        "create_model",
        session_id=session["session_id"],
        model_seq_id=0,
        base_model="fake/tiny",
        lora_config={"rank": 8, "train_mlp": True, "novel": 1},
        user_metadata=None,
        type="create_model",
        novel={"a": 1},
    )
    model_id = accepted["model_id"]
    assert (await api.result(accepted))["model_id"] == model_id
    step = await api.ok("optim_step", model_id=model_id, adam_params={"learning_rate": 1e-4})
    assert "metrics" in await api.result(step)
    saved = await api.ok("save_weights", model_id=model_id, path="old", seq_id=2)
    path = (await api.result(saved))["path"]
    loaded = await api.ok(
        "load_weights", model_id=model_id, path=path, optimizer=True, seq_id=3, type="load_weights"
    )
    assert (await api.result(loaded))["path"] == path
    bob = api.as_user("bob")
    assert (await bob.post("load_weights", model_id=model_id, path=path)).status_code == 404
