"""copy_weights: whose, where to, once."""

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from tests.api.checkpoints.calls import load, publish, saved, unpublish, url
from tests.api.harness import Api
from tinkercloud.services.checkpoints import checkpoint_files
from tinkercloud.services.checkpoints.checkpoint_writer import FOLDER


async def copy(api: Api, path: str, *, key: str | None = None, **fields: Any) -> Any:
    body = {"source_path": path, "destination_project_id": "proj"} | fields
    headers = {} if key is None else {"X-Idempotency-Key": key}
    return await api.http.post("/api/v1/copy_weights", json=body, headers=headers)


async def copied(api: Api, path: str, **fields: Any) -> str:
    response = await copy(api, path, **fields)
    assert response.status_code == 200, response.text
    return response.json()["tinker_path"]


def inodes(api: Api, path: str) -> dict[str, int]:
    run, segment, name = path.removeprefix("tinker://").split("/")
    [folder] = (api.services.config.data_dir / FOLDER / run / segment / name).iterdir()
    return {f.name: f.stat().st_ino for f in Path(folder).iterdir() if f.name != "manifest.json"}


async def test_a_copy_is_the_same_checkpoint_in_a_run_of_its_own(api: Api) -> None:
    model_id, path = await saved(api)
    target = await copied(api, path)
    assert target.endswith("/weights/ck1")
    assert target != path
    assert inodes(api, target) == inodes(api, path)  # no bytes twice
    assert await api.loss(await load(api, target, optimizer=True), 1) == await api.loss(model_id, 4)


async def test_a_copy_outlives_its_source(api: Api) -> None:
    model_id, path = await saved(api)
    target = await copied(api, path)
    assert (await api.http.delete(url(path))).status_code == 204
    assert await api.loss(await load(api, target), 1) == await api.loss(model_id, 4)


async def test_the_source_outlives_its_copy(api: Api) -> None:
    model_id, path = await saved(api)
    assert (await api.http.delete(url(await copied(api, path)))).status_code == 204
    assert await api.loss(await load(api, path), 1) == await api.loss(model_id, 4)


async def test_a_full_disk_is_named_and_the_copy_can_be_made_later(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link_files(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    _, path = await saved(api)
    body = {"source_path": path, "session_id": await api.session(), "model_seq_id": 7}
    with monkeypatch.context() as full:
        full.setattr(checkpoint_files, "link_files", link_files)
        response = await api.http.post("/api/v1/copy_weights", json=body)
    assert response.status_code == 503
    assert "cannot be written (No space left on device)" in response.text
    assert (await api.http.post("/api/v1/copy_weights", json=body)).status_code == 200


async def test_a_copys_run_is_listed_and_cannot_be_trained(api: Api) -> None:
    _, path = await saved(api)
    run_id = (await copied(api, path)).split("/")[2]
    run = (await api.get(f"training_runs/{run_id}")).json()
    assert run["user_metadata"] == {"copied_from": path}
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/ck1"
    assert (await api.post("optim_step", model_id=run_id, seq_id=1)).status_code == 404
    session = (await api.get(f"sessions/{run_id.partition(':')[0]}")).json()
    assert session["training_run_ids"] == [run_id]


async def test_a_copy_has_its_own_ttl_and_is_private(api: Api) -> None:
    _, path = await saved(api)
    await publish(api, path)
    target = await copied(api, path, ttl_seconds=3600)
    listed = {c["tinker_path"]: c for c in (await api.get("checkpoints")).json()["checkpoints"]}
    assert "expires_at" in listed[target]
    assert "expires_at" not in listed[path]
    assert (listed[path]["public"], listed[target]["public"]) == (True, False)
    assert (await copy(api, path, ttl_seconds=-1)).status_code == 422


async def test_a_repeated_request_is_one_copy(api: Api) -> None:
    _, path = await saved(api)
    responses = await asyncio.gather(*(copy(api, path, key="k1") for _ in range(5)))
    assert len({response.json()["tinker_path"] for response in responses}) == 1
    assert await copied(api, path, key="k2") != responses[0].json()["tinker_path"]
    assert await copied(api, path) != await copied(api, path)
    bob = api.as_user("bob")
    await publish(api, path)
    assert await copied(bob, path, key="k1") != responses[0].json()["tinker_path"]
    assert len((await api.get("checkpoints")).json()["checkpoints"]) == 1 + 4


async def test_a_key_names_one_source(api: Api) -> None:
    _, path = await saved(api)
    _, other = await saved(api)
    await copied(api, path, key="k1")
    refused = await copy(api, other, key="k1")
    assert refused.status_code == 422
    assert "other weights" in refused.json()["detail"]


async def test_a_copy_into_a_session_takes_its_number(api: Api) -> None:
    model_id, path = await saved(api)
    session_id = await api.session()
    place = {"session_id": session_id, "model_seq_id": 3, "destination_project_id": None}
    target = await copied(api, path, **place)
    assert target == f"tinker://{session_id}:train:3/weights/ck1"
    assert await copied(api, path, **place) == target
    taken = {"session_id": model_id.partition(":")[0], "model_seq_id": 0}
    refused = await copy(api, path, **taken)
    assert (refused.status_code, "other weights" in refused.json()["detail"]) == (422, True)


async def test_a_copy_needs_a_place_of_ones_own(api: Api) -> None:
    _, path = await saved(api)
    assert (await copy(api, path, destination_project_id=None)).status_code == 422
    assert (await copy(api, path, destination_project_id="x" * 300)).status_code == 422
    assert (await copy(api, path, key="x" * 300)).status_code == 422
    theirs = {"session_id": await api.as_user("bob").session(), "model_seq_id": 0}
    assert (await copy(api, path, **theirs)).status_code == 404


async def test_others_copy_only_what_is_published(api: Api) -> None:
    model_id, path = await saved(api)
    bob = api.as_user("bob")
    assert (await copy(bob, path)).status_code == 404
    await publish(api, path)
    target = await copied(bob, path)
    await unpublish(api, path)
    assert (await copy(bob, path)).status_code == 404
    assert await bob.loss(await load(bob, target), 1) == await api.loss(model_id, 4)
    assert (await api.post("weights_info", tinker_path=target)).status_code == 404


async def test_an_access_token_copies_from_its_account(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    _, path = await saved(api)
    bob = api.as_user("bob")
    body = {"source_path": path, "destination_project_id": "p"}

    async def with_token(token: str) -> int:
        headers = {"X-Tinker-Weights-Access-Token": token}
        response = await bob.http.post("/api/v1/copy_weights", json=body, headers=headers)
        assert token not in response.text
        return response.status_code

    assert await with_token("tml-wrong") == 400
    assert await with_token(bob.key) == 404
    assert await with_token(api.key) == 200
    assert (await bob.get("checkpoints")).json()["cursor"]["total_count"] == 1
    assert api.key not in caplog.text


@pytest.mark.parametrize("kind", ["save_weights_for_sampler", "save_weights_external"])
async def test_a_copy_keeps_its_kind(api: Api, kind: str) -> None:
    _, path = await saved(api, kind)
    assert (await copied(api, path)).split("/")[3:] == path.split("/")[3:]
