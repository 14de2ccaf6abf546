"""The upload of custom losses: checked, numbered, of one session. On `fake` none runs."""

import json
from typing import Any

import pytest

from tests.api.harness import Api, wire_datum


def body(session_id: str, number: int = 0, target: str = "sum") -> dict[str, Any]:
    nodes = [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "call_method", "name": "total", "target": target, "args": [{"ref": "logprobs"}]},
        {
            "op": "output",
            "name": "output",
            "target": "output",
            "args": [{"tuple": [{"ref": "total"}, {"dict": {}}]}],
        },
    ]
    return {
        "session_id": session_id,
        "custom_loss_seq_id": number,
        "name": "total",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {"format": 1, "nodes": nodes},
    }


async def test_an_upload_has_an_id_and_the_same_number_is_the_same_loss(api: Api) -> None:
    session_id = await api.session()
    first = await api.ok("create_custom_loss", **body(session_id))
    again = await api.ok("create_custom_loss", **body(session_id))
    assert again["request_id"] == first["request_id"]
    assert (await api.result(first))["loss_id"] == f"{session_id}:loss:0"
    second = await api.ok("create_custom_loss", **body(session_id, 1))
    assert (await api.result(second))["loss_id"] == f"{session_id}:loss:1"


async def test_a_graph_that_cannot_run_fails_its_future(api: Api) -> None:
    session_id = await api.session()
    accepted = await api.ok("create_custom_loss", **body(session_id, target="tolist"))
    assert "'total' (tolist)" in await api.failure(accepted)
    large = body(session_id, 1) | {"name": "x" * 2**20}
    assert "characters of JSON" in await api.failure(await api.ok("create_custom_loss", **large))


async def test_the_fake_backend_says_where_custom_losses_run(api: Api) -> None:
    session_id = await api.session()
    loss_id = (await api.result(await api.ok("create_custom_loss", **body(session_id))))["loss_id"]
    model = await api.model(session_id)
    config = {"loss_fn_config": {"loss_id": loss_id}, "loss_fn": "custom"}
    accepted = await api.forward_backward(model, 1, **config)
    assert "--backend embedded" in await api.failure(accepted)
    assert "metrics" in await api.result(await api.optim_step(model, 2))


async def test_only_models_of_its_session_train_with_a_loss(api: Api) -> None:
    bob = api.as_user("bob")
    session_id = await api.session()
    accepted = await api.ok("create_custom_loss", **body(session_id))
    loss_id = (await api.result(accepted))["loss_id"]
    assert (await bob.post("create_custom_loss", **body(session_id, 1))).status_code == 404
    for user in (api, bob):
        model = await user.model()
        refused = await user.forward_backward(
            model, 1, loss_fn="custom", loss_fn_config={"loss_id": loss_id}
        )
        assert "not one of this session" in await user.failure(refused)


@pytest.mark.parametrize(
    "config", [{}, {"loss_id": 1.0}, {"loss_id": "x", "beta": 1.0}, {"loss_id": "none"}]
)
async def test_a_faulty_choice_of_a_loss_is_refused(api: Api, config: dict[str, Any]) -> None:
    model = await api.model()
    accepted = await api.forward_backward(model, 1, loss_fn="custom", loss_fn_config=config)
    assert "loss" in await api.failure(accepted)


async def test_data_must_have_what_the_loss_declares(api: Api) -> None:
    session_id = await api.session()
    upload = body(session_id)
    upload["inputs"].append({"name": "scale", "rank": 0})
    upload["graph"]["nodes"].insert(1, {"op": "placeholder", "name": "scale", "target": "scale"})
    accepted = await api.ok("create_custom_loss", **json.loads(json.dumps(upload)))
    config = {"loss_id": (await api.result(accepted))["loss_id"]}
    model = await api.model(session_id)
    cases = [
        (wire_datum(), "'scale' is missing"),
        (wire_datum(scale=[1.0, 2.0]), "declared of rank 0"),
        (wire_datum(target_tokens=[[1, 2]] * 4, scale=[1.0]), "declares logprobs of rank 1"),
    ]
    for seq_id, (datum, text) in enumerate(cases, start=1):
        options = {"loss_fn": "custom", "loss_fn_config": config}
        accepted = await api.forward_backward(model, seq_id, [datum], **options)
        assert text in await api.failure(accepted)


async def test_losses_go_with_their_session(api: Api) -> None:
    session_id = await api.session()
    await api.result(await api.ok("create_custom_loss", **body(session_id)))
    await api.ok(f"sessions/{session_id}/finish", reason={"type": "success"}, detail=None)
    assert await api.services.database.all("SELECT * FROM custom_losses") == []
    late = await api.post("create_custom_loss", **body(session_id, 1))
    assert late.status_code == 410
