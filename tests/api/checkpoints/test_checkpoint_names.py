"""A bare name of a checkpoint: near ones first, never another user's, never a guess."""

from typing import Any

import pytest

from tests.api.harness import Api


async def save(api: Api, model_id: str, seq_id: int, name: str, kind: str = "save_weights") -> str:
    accepted = await api.ok(kind, model_id=model_id, path=name, seq_id=seq_id)
    return (await api.result(accepted))["path"]


async def load(api: Api, path: str, **where: Any) -> Any:
    """The result of loading, or its failure."""
    return await api.result(await api.ok("load_weights", path=path, **where))


async def test_a_model_loads_what_it_saved_by_its_name(api: Api) -> None:
    session_id = await api.session()
    ours, theirs = await api.model(session_id, 0), await api.model(session_id, 1)
    path = await save(api, ours, 1, "step")
    loss = await api.loss(ours, 2)
    await save(api, theirs, 1, "step")
    await api.train(ours, 3)
    assert await api.loss(ours, 5) != loss
    result = await load(api, "step", model_id=ours, seq_id=6)
    assert result == {"path": path, "model_id": ours, "type": "load_weights"}
    assert await api.loss(ours, 7) == loss


async def test_a_save_just_before_is_found(api: Api) -> None:
    model_id = await api.model()
    await api.ok("save_weights", model_id=model_id, path="now", seq_id=1)
    result = await load(api, "now", model_id=model_id, seq_id=2, optimizer=True)
    assert result["path"] == f"tinker://{model_id}/weights/now"


async def test_a_name_of_the_session_comes_before_one_of_another(api: Api) -> None:
    session_id = await api.session()
    path = await save(api, await api.model(session_id, 0), 1, "step")
    await save(api, await api.model(), 1, "step")
    assert (await load(api, "step", session_id=session_id, model_seq_id=1))["path"] == path
    assert (await load(api, "weights/step", session_id=session_id, model_seq_id=2))["path"] == path


async def test_a_name_from_another_session_is_found(api: Api) -> None:
    path = await save(api, await api.model(), 1, "alone")
    session_id = await api.session()
    assert (await load(api, "alone", session_id=session_id, model_seq_id=0))["path"] == path
    assert (await api.ok("weights_info", tinker_path="alone"))["lora_rank"] == 32


async def test_a_name_with_its_kind_is_a_samplers(api: Api) -> None:
    model_id = await api.model()
    path = await save(api, model_id, 1, "step", "save_weights_for_sampler")
    assert (await load(api, "sampler_weights/step", model_id=model_id, seq_id=2))["path"] == path
    accepted = await api.ok("load_weights", path="step", model_id=model_id, seq_id=3)
    assert "does not exist" in await api.failure(accepted)


async def test_a_name_of_several_is_refused_with_their_paths(api: Api) -> None:
    session_id = await api.session()
    models = [await api.model(session_id, number) for number in range(7)]
    paths = [await save(api, model_id, 1, "step") for model_id in models]
    refused = await api.post("load_weights", path="step", session_id=session_id, model_seq_id=9)
    assert refused.status_code == 422
    text = refused.json()["detail"]
    assert sum(path in text for path in paths) == 5
    assert text.endswith(", and 2 more")
    fresh = await api.model()
    accepted = await api.ok("load_weights", path="step", model_id=fresh, seq_id=1)
    assert "name of several checkpoints" in await api.failure(accepted)


async def test_another_users_names_are_not_there(api: Api) -> None:
    bob = api.as_user("bob")
    await save(api, await api.model(), 1, "secret")
    session_id = await bob.session()
    refused = await bob.post("load_weights", path="secret", session_id=session_id, model_seq_id=0)
    assert refused.status_code == 404
    assert (await bob.post("weights_info", tinker_path="secret")).status_code == 404
    mine = await save(bob, await bob.model(), 1, "secret")
    assert (await load(bob, "secret", session_id=session_id, model_seq_id=1))["path"] == mine


@pytest.mark.parametrize("name", ["", "../x", "a/b", "weights/", "a b", "tinker:x", "x" * 129])
async def test_what_is_no_name_is_refused(api: Api, name: str) -> None:
    session_id = await api.session()
    refused = await api.post("load_weights", path=name, session_id=session_id, model_seq_id=0)
    assert refused.status_code == 422
    assert "tinker://MODEL/SEGMENT/NAME" in refused.json()["detail"]


async def test_an_expired_one_is_gone(api: Api) -> None:
    model_id = await api.model()
    path = await save(api, model_id, 1, "brief")
    model, _, _ = path.removeprefix("tinker://").split("/")
    expiry = {"ttl_seconds": 3600}
    url = f"/api/v1/training_runs/{model}/checkpoints/weights/brief/ttl"
    assert (await api.http.put(url, json=expiry)).status_code == 204
    assert (await api.ok("weights_info", tinker_path="brief"))["is_lora"]
    await api.services.database.write("UPDATE checkpoints SET expires_at = 1")
    assert (await api.post("weights_info", tinker_path="brief")).status_code == 404
