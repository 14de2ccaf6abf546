"""Creating, describing and deleting models; sessions."""

from pathlib import Path

import httpx
import pytest

from tests.api.harness import Api, serving
from tinkercloud.config import ModelSource
from tinkercloud.storage.metadata import Model


async def test_the_model_id_is_what_the_client_computes(api: Api) -> None:
    session_id = await api.session()
    assert await api.model(session_id, 3) == f"{session_id}:train:3"


async def test_get_info_describes_the_model(api: Api) -> None:
    model_id = await api.model(lora_config={"rank": 8, "seed": 1})
    assert await api.ok("get_info", model_id=model_id) == {
        "type": "get_info",
        "model_id": model_id,
        "model_data": {"arch": "fake", "model_name": "fake/tiny", "tokenizer_id": "fake/tiny"},
        "optimizer_config": {"type": "adamw"},
        "is_lora": True,
        "lora_rank": 8,
        "model_name": "fake/tiny",
    }


async def test_the_tokenizer_id_is_the_folder_where_there_is_one(tmp_path: Path) -> None:
    source = ModelSource("org/name", tmp_path)
    async with serving(tmp_path / "data", models=(source,)) as api:
        model_id = await api.model(base_model="org/name")
        info = await api.ok("get_info", model_id=model_id)
    assert info["model_data"]["tokenizer_id"] == str(tmp_path)


@pytest.mark.parametrize(
    ("address", "headers", "tokenizer"),
    [
        ("127.0.0.1", {}, "folder"),
        ("::1", {}, "folder"),
        ("10.0.0.5", {}, "org/name"),
        ("testclient", {}, "org/name"),
        ("127.0.0.1", {"X-Forwarded-For": "10.0.0.5"}, "org/name"),
    ],
)
async def test_a_client_elsewhere_gets_a_name_and_no_path(
    tmp_path: Path, address: str, headers: dict[str, str], tokenizer: str
) -> None:
    source = ModelSource("org/name", tmp_path)
    async with serving(tmp_path / "data", models=(source,)) as api:
        model_id = await api.model(base_model="org/name")
        transport = httpx.ASGITransport(app=api.app, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            answered = await http.post(
                "/api/v1/get_info",
                json={"model_id": model_id},
                headers={"X-API-Key": api.key, **headers},
            )
    expected = str(tmp_path) if tokenizer == "folder" else tokenizer
    assert answered.json()["model_data"]["tokenizer_id"] == expected


async def test_rank_zero_is_full_training(api: Api) -> None:
    model_id = await api.model(lora_config={"rank": 0})
    info = await api.ok("get_info", model_id=model_id)
    assert (info["is_lora"], info["lora_rank"]) == (False, 0)


async def test_a_base_model_not_served_is_refused_with_those_that_are(api: Api) -> None:
    response = await api.post(
        "create_model", session_id=await api.session(), model_seq_id=0, base_model="no/such"
    )
    assert response.status_code == 400
    assert "fake/tiny" in response.json()["detail"]


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_config": {"rank": -1}},
        {"lora_config": {"rank": 1025}},
        {"lora_config": {"rank": 10**30}},
        {"lora_config": {"train_attn": False, "train_mlp": False, "train_unembed": False}},
        {"optimizer_config": {"type": "dimuon", "version": 1}},
        {"model_seq_id": -1},
        {"model_seq_id": 10**30},
        {"base_model": 7},
    ],
)
async def test_a_model_that_cannot_be_made_is_refused(api: Api, fields: dict) -> None:
    body = {"session_id": await api.session(), "model_seq_id": 0, "base_model": "fake/tiny"}
    assert (await api.post("create_model", **(body | fields))).status_code == 422


async def test_unknown_fields_are_ignored(api: Api) -> None:
    assert await api.model(something_new={"x": 1})


async def test_a_seed_may_be_any_integer(api: Api) -> None:
    session_id = await api.session()
    for number, seed in enumerate((-5, 2**70, None)):
        assert await api.model(session_id, number, lora_config={"rank": 4, "seed": seed})


async def test_a_deleted_model_takes_no_more_requests(api: Api) -> None:
    model_id = await api.model()
    last = await api.optim_step(model_id, 1)
    assert await api.ok("delete_model", model_id=model_id) == {
        "model_id": model_id,
        "type": "delete_model",
    }
    assert "metrics" in await api.result(last)
    assert (await api.post("get_info", model_id=model_id)).status_code == 404
    assert (await api.post("optim_step", model_id=model_id, seq_id=2)).status_code == 404
    assert "does not exist" in await api.failure(await api.forward_backward(model_id, 2))
    assert (await api.post("delete_model", model_id=model_id)).status_code == 404


async def test_a_pass_that_comes_as_its_model_is_deleted_says_so(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was acknowledged once the lane had been found empty."""
    model_id = await api.model()
    models = api.services.models
    found = await models.require("ann", model_id)
    await api.ok("delete_model", model_id=model_id)
    await models.freed()

    async def find(user: str, model_id: str) -> Model:
        return found

    monkeypatch.setattr(models, "find", find)
    assert "does not exist" in await api.failure(await api.forward_backward(model_id, 1))
    assert "does not exist" in await api.failure(await api.optim_step(model_id, 2))
    kept = await api.services.database.all(
        "SELECT kind FROM operations WHERE model_id = ? AND applied", model_id
    )
    assert "OptimStep" not in [row["kind"] for row in kept]


async def test_an_unloaded_model_is_gone_and_the_request_can_be_repeated(api: Api) -> None:
    model_id = await api.model()
    last = await api.optim_step(model_id, 1)
    accepted = await api.ok("unload_model", model_id=model_id, type="unload_model")
    assert await api.result(accepted) == {"model_id": model_id, "type": "unload_model"}
    assert "metrics" in await api.result(last)
    assert (await api.post("get_info", model_id=model_id)).status_code == 404
    again = await api.ok("unload_model", model_id=model_id, type="unload_model")
    assert again["request_id"] == accepted["request_id"]


async def test_another_users_model_does_not_exist(api: Api) -> None:
    bob = api.as_user("bob")
    model_id = await api.model()
    for path in ("get_info", "optim_step", "delete_model", "unload_model"):
        assert (await bob.post(path, model_id=model_id, seq_id=1)).status_code == 404, path
    for path in ("save_weights", "save_weights_for_sampler"):
        assert (await bob.post(path, model_id=model_id, path="x")).status_code == 404, path
    theirs = await bob.forward_backward(model_id, 1)
    assert "does not exist" in await bob.failure(theirs)
    ours = await api.forward_backward(model_id, 1)
    assert ours["request_id"] != theirs["request_id"]
    assert (await api.result(ours)).metrics["loss:sum"] > 0


async def test_another_users_session_does_not_exist(api: Api) -> None:
    bob = api.as_user("bob")
    session_id = await api.session()
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "fake/tiny"}
    assert (await bob.post("create_model", **body)).status_code == 404
    assert (await bob.post("session_heartbeat", session_id=session_id)).status_code == 404
    assert (await bob.get(f"sessions/{session_id}")).status_code == 404
    finish = {"reason": {"type": "success"}, "detail": None}
    assert (await bob.post(f"sessions/{session_id}/finish", **finish)).status_code == 404
    assert (await bob.get("sessions")).json() == {"sessions": [], "states": {}}
    assert (await api.ok("session_heartbeat", session_id=session_id)) == {
        "type": "session_heartbeat"
    }


async def test_a_finished_session_stops_its_heartbeat(api: Api) -> None:
    session_id = await api.session()
    for reason in ("success", "errored"):
        await api.ok(f"sessions/{session_id}/finish", reason={"type": reason}, detail=None)
    assert (await api.post("session_heartbeat", session_id=session_id)).status_code == 410
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "fake/tiny"}
    assert (await api.post("create_model", **body)).status_code == 410


async def test_a_finished_session_frees_its_models_and_versions(api: Api) -> None:
    session_id = await api.session()
    model_id = await api.model(session_id)
    saved = await api.result(
        await api.ok(
            "save_weights_for_sampler", model_id=model_id, sampling_session_seq_id=0, seq_id=1
        )
    )
    await api.result(await api.sample(saved["sampling_session_id"]))
    stats = api.services.backend.stats()
    assert (stats["num_models"], stats["num_versions"]) == (1, 1)
    last = await api.optim_step(model_id, 2)
    await api.ok(f"sessions/{session_id}/finish", reason={"type": "success"}, detail=None)
    assert "metrics" in await api.result(last)
    await api.services.models.freed()
    stats = api.services.backend.stats()
    assert (stats["num_models"], stats["num_versions"]) == (0, 0)
    assert "finished" in await api.failure(await api.sample(saved["sampling_session_id"]))


async def test_the_client_configuration_can_be_set(tmp_path: Path) -> None:
    flags = {"parallel_fwdbwd_chunks": False, "proto_compress_fwdbwd": True}
    async with serving(tmp_path, client_config=flags) as api:
        sent = await api.ok("client/config", sdk_version="0.38.0")
        assert sent == flags | {"pjwt_auth_enabled": True}


async def test_custom_losses_run_on_the_server_where_the_setting_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path, server_losses=True) as api:
        assert (await api.ok("client/config", sdk_version="0.38.0"))["custom_loss_server_side"]


async def test_the_start_up_calls_answer(api: Api) -> None:
    assert await api.ok("client/config", sdk_version="0.38.0") == {"pjwt_auth_enabled": True}
    assert await api.ok("client/config", sdk_version="0.18.2") == {}
    assert await api.ok("client/config", sdk_version="unknown") == {}
    assert (await api.ok("client/dynamic_config"))["refresh_interval_sec"] == 300
    assert await api.ok("telemetry", events=[{"event": "X"}]) == {"status": "accepted"}
    assert (await api.get("healthz")).json() == {"status": "ok"}
    health = (await api.http.get("/health")).json()
    assert (health["status"], health["num_pending"]) == ("ok", 0)
    assert "reason" not in health
    api.services.backend.trouble = lambda: "the engine is away"  # type: ignore[method-assign]
    health = (await api.http.get("/health")).json()
    assert (health["status"], health["reason"]) == ("degraded", "the engine is away")


async def test_capabilities_list_what_is_served(api: Api) -> None:
    [model] = (await api.get("get_server_capabilities")).json()["supported_models"]
    assert model == {
        "model_name": "fake/tiny",
        "max_context_length": 2048,
        "trainable": True,
        "sampleable": True,
    }


async def test_a_session_lists_what_it_holds(api: Api) -> None:
    session = await api.ok("create_session", user_metadata={"k": "v"}, display_name="d")
    session_id = session["session_id"]
    model_id = await api.model(session_id)
    sampler_id = await api.sampler(session_id)
    assert (await api.get(f"sessions/{session_id}")).json() == {
        "training_run_ids": [model_id],
        "sampler_ids": [sampler_id],
        "user_metadata": {"k": "v"},
        "display_name": "d",
        "project_id": "default",
        "status": {"type": "active"},
        "state": "active",
    }
    assert (await api.get("sessions")).json()["states"] == {session_id: "active"}


async def test_a_failed_creation_leaves_no_model(api: Api) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    api.services.backend.create_model = broken  # type: ignore[method-assign]
    session_id = await api.session()
    accepted = await api.ok(
        "create_model", session_id=session_id, model_seq_id=0, base_model="fake/tiny"
    )
    error = await api.failure(accepted, "server")
    assert "out of memory" not in error
    assert (await api.post("get_info", model_id=accepted["model_id"])).status_code == 404
    assert (await api.get("training_runs")).json()["training_runs"] == []
