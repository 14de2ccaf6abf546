"""Publishing: what other users may read, and that it ends."""

from typing import Any

import pytest

from tests.api.checkpoints.calls import publish, saved, unpublish, url
from tests.api.harness import Api


async def load(api: Api, path: str, **fields: Any) -> Any:
    return await api.post(
        "load_weights",
        session_id=await api.session(),
        model_seq_id=0,
        path=path,
        optimizer=False,
        **fields,
    )


async def test_a_published_checkpoint_is_read_by_others_until_it_is_unpublished(api: Api) -> None:
    model_id, path = await saved(api)
    bob = api.as_user("bob")
    session_id = await bob.session()
    assert (await load(bob, path)).status_code == 404
    assert (await bob.post("weights_info", tinker_path=path)).status_code == 404

    await publish(api, path)
    loaded = (await bob.result((await load(bob, path)).json()))["model_id"]
    assert await bob.loss(loaded, 1) == await api.loss(model_id, 4)
    assert (await bob.ok("weights_info", tinker_path=path))["lora_rank"] == 8
    sampler = await bob.sampler(session_id, model_path=path)
    (theirs,) = (await bob.result(await bob.sample(sampler, seq_id=0))).sequences
    own = await api.sampler(await api.session(), model_path=path)
    (ours,) = (await api.result(await api.sample(own))).sequences
    assert theirs.tokens.tolist() == ours.tokens.tolist()
    assert theirs.logprobs.tolist() == ours.logprobs.tolist()

    await unpublish(api, path)
    assert (await load(bob, path)).status_code == 404
    assert (await bob.post("weights_info", tinker_path=path)).status_code == 404
    body = {"session_id": session_id, "sampling_session_seq_id": 1, "model_path": path}
    assert (await bob.post("create_sampling_session", **body)).status_code == 404
    assert "does not exist" in await bob.failure(await bob.sample(sampler, seq_id=1))
    assert (await bob.loss(loaded, 2)) > 0  # the model made meanwhile is bob's


async def test_unpublishing_leaves_the_checkpoint_there(api: Api) -> None:
    _, path = await saved(api)
    await publish(api, path)
    await unpublish(api, path)
    assert (await api.post("weights_info", tinker_path=path)).status_code == 200


async def test_publishing_twice_and_unpublishing_twice_change_nothing(api: Api) -> None:
    _, path = await saved(api)
    for _ in range(2):
        await publish(api, path)
    assert (await api.get("checkpoints")).json()["checkpoints"][0]["public"] is True
    for _ in range(2):
        await unpublish(api, path)
    assert (await api.get("checkpoints")).json()["checkpoints"][0]["public"] is False


async def test_only_the_owner_publishes_changes_and_deletes(api: Api) -> None:
    _, path = await saved(api)
    bob = api.as_user("bob")
    assert (await bob.http.post(url(path, "/publish"))).status_code == 404
    await publish(api, path)
    assert (await bob.http.delete(url(path, "/publish"))).status_code == 404
    assert (await bob.http.delete(url(path))).status_code == 404
    ttl = await bob.http.put(url(path, "/ttl"), json={"ttl_seconds": 3600})
    assert ttl.status_code == 404
    assert (await bob.post("weights_info", tinker_path=path)).status_code == 200


async def test_other_checkpoints_of_the_run_stay_invisible(api: Api) -> None:
    model_id, path = await saved(api)
    accepted = await api.ok("save_weights_for_sampler", model_id=model_id, path="s", seq_id=4)
    private = (await api.result(accepted))["path"]
    bob = api.as_user("bob")
    assert (await bob.get(f"training_runs/{model_id}/checkpoints")).status_code == 404
    await publish(api, path)
    listed = (await bob.get(f"training_runs/{model_id}/checkpoints")).json()["checkpoints"]
    assert [(c["tinker_path"], c["public"]) for c in listed] == [(path, True)]
    assert (await bob.post("weights_info", tinker_path=private)).status_code == 404
    assert (await bob.get("checkpoints")).json()["checkpoints"] == []
    assert len((await api.get(f"training_runs/{model_id}/checkpoints")).json()["checkpoints"]) == 2


async def test_runs_with_published_checkpoints_are_listed_as_accessible(api: Api) -> None:
    model_id, path = await saved(api)
    bob = api.as_user("bob")
    own = await bob.model()
    scope = {"access_scope": "accessible"}

    async def runs(**params: str) -> list[str]:
        listed = (await bob.get("training_runs", **params)).json()
        assert listed["cursor"]["total_count"] == len(listed["training_runs"])
        return [run["training_run_id"] for run in listed["training_runs"]]

    assert await runs(**scope) == [own]
    await publish(api, path)
    assert await runs(**scope) == [own, model_id]
    assert await runs() == [own]
    assert (await bob.get(f"training_runs/{model_id}")).status_code == 404
    run = (await bob.get(f"training_runs/{model_id}", **scope)).json()
    assert run["last_checkpoint"]["tinker_path"] == path
    assert (run["model_owner"], run["user_metadata"]) == ("ann", {})
    assert (await api.get(f"training_runs/{model_id}")).json()["user_metadata"] != {}
    await unpublish(api, path)
    assert await runs(**scope) == [own]
    assert (await bob.get(f"training_runs/{model_id}", **scope)).status_code == 404


async def test_an_unknown_access_scope_is_refused(api: Api) -> None:
    assert (await api.get("training_runs", access_scope="everything")).status_code == 422


async def test_what_replaces_a_published_checkpoint_is_private(api: Api) -> None:
    model_id, path = await saved(api)
    await publish(api, path)
    accepted = await api.ok("save_weights", model_id=model_id, path="ck1", seq_id=4, overwrite=True)
    assert (await api.result(accepted))["path"] == path
    assert (await api.as_user("bob").post("weights_info", tinker_path=path)).status_code == 404
    assert await api.services.database.all("SELECT * FROM published") == []


@pytest.mark.parametrize("how", ["delete", "expire"])
async def test_a_published_checkpoint_that_ends_is_gone_for_all(api: Api, how: str) -> None:
    _, path = await saved(api)
    await publish(api, path)
    if how == "delete":
        assert (await api.http.delete(url(path))).status_code == 204
    else:
        await api.services.database.write("UPDATE checkpoints SET expires_at = created_at")
        assert (await api.as_user("bob").post("weights_info", tinker_path=path)).status_code == 404
        await api.services.checkpoints.remove_expired()
    assert (await api.as_user("bob").post("weights_info", tinker_path=path)).status_code == 404
    assert await api.services.database.all("SELECT * FROM published") == []


async def test_an_access_token_reads_the_weights_of_its_account(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    model_id, path = await saved(api)
    bob = api.as_user("bob")
    refused = await load(bob, path, weights_access_token="tml-wrong")
    assert refused.status_code == 400
    assert "weights_access_token" in refused.json()["detail"]
    assert (await load(bob, path, weights_access_token=bob.key)).status_code == 404
    accepted = await load(bob, path, weights_access_token=api.key)
    loaded = (await bob.result(accepted.json()))["model_id"]
    assert await bob.loss(loaded, 1) == await api.loss(model_id, 4)
    assert api.key not in caplog.text
    rows = await api.services.database.all("SELECT * FROM futures")
    assert not any(api.key.encode() in str(tuple(row)).encode() for row in rows)
