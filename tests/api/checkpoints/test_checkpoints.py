"""Saving, naming, loading, listing, expiring."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.api.checkpoints.calls import load
from tests.api.harness import Api, serving
from tinkercloud import flushing
from tinkercloud.errors import StorageFailed
from tinkercloud.services.checkpoints import checkpoint_files
from tinkercloud.services.checkpoints.checkpoint_writer import FOLDER
from tinkercloud.storage.metadata import Checkpoint


async def save(api: Api, model_id: str, seq_id: int, name: str = "ck1", **fields: Any) -> Any:
    """The result of save_weights, or of another kind of save."""
    kind = fields.pop("kind", "save_weights")
    return await api.result(
        await api.ok(kind, model_id=model_id, path=name, seq_id=seq_id, **fields)
    )


async def trained(api: Api) -> str:
    """A model after two steps; its next number is 5."""
    model_id = await api.model(lora_config={"rank": 8, "seed": 4})
    for seq_id in (1, 3):
        await api.train(model_id, seq_id)
    return model_id


async def test_both_kinds_may_have_the_same_name(api: Api) -> None:
    model_id = await trained(api)
    weights = await save(api, model_id, 5)
    sampler = await save(api, model_id, 6, kind="save_weights_for_sampler")
    assert weights == {"path": f"tinker://{model_id}/weights/ck1", "type": "save_weights"}
    assert sampler["path"] == f"tinker://{model_id}/sampler_weights/ck1"


@pytest.mark.parametrize("optimizer", [True, False])
async def test_a_model_resumes_from_a_checkpoint_after_a_restart(
    tmp_path: Path, optimizer: bool
) -> None:
    async with serving(tmp_path) as api:
        model_id = await trained(api)
        path = (await save(api, model_id, 5))["path"]
        loss_then = await api.loss(model_id, 6)
        await api.train(model_id, 7)
        loss_next = await api.loss(model_id, 9)
    async with serving(tmp_path) as api:
        resumed = await load(api, path, optimizer=optimizer)
        assert await api.loss(resumed, 1) == loss_then
        await api.train(resumed, 2)
        same = await api.loss(resumed, 4) == loss_next
        info = await api.ok("get_info", model_id=resumed)
    assert same == optimizer  # fresh moments take another step
    assert info["lora_rank"] == 8


async def test_the_legacy_form_loads_into_a_model(api: Api) -> None:
    source = await trained(api)
    path = (await save(api, source, 5))["path"]
    target = await api.model(lora_config={"rank": 8})
    accepted = await api.ok("load_weights", model_id=target, seq_id=1, path=path, optimizer=True)
    assert (await api.result(accepted))["model_id"] == target
    assert await api.loss(target, 2) == await api.loss(source, 6)


async def test_a_checkpoint_is_immutable(api: Api) -> None:
    model_id = await trained(api)
    await save(api, model_id, 5)
    again = await save(api, model_id, 6)
    assert again["category"] == "user"
    assert "exists already" in again["error"]


async def test_overwrite_replaces_weights_and_metadata(api: Api) -> None:
    model_id = await trained(api)
    path = (await save(api, model_id, 5, user_metadata={"a": 1}))["path"]
    await api.train(model_id, 6)
    await save(api, model_id, 8, overwrite=True, user_metadata={"b": {"c": 2}})
    assert await api.loss(await load(api, path), 1) == await api.loss(model_id, 9)
    [listed] = (await api.get("checkpoints")).json()["checkpoints"]
    assert listed["user_metadata"] == {"b": '{"c": 2}'}


async def test_a_replaced_checkpoint_leaves_no_files(api: Api) -> None:
    model_id = await trained(api)
    for seq_id in (5, 6):
        await save(api, model_id, seq_id, overwrite=True)
    root = api.services.config.data_dir / FOLDER
    assert len(list(root.glob("*/*/*/*"))) == 1


@pytest.mark.parametrize(
    "name",
    ["../x", "..", ".", ".hidden", "a/b", "a\\b", "", "a" * 129, "/etc/passwd", "a\0b", "é", "a b",
     "name\n", "%2e%2e", None],
)  # fmt: skip
async def test_a_name_that_could_leave_its_folder_is_refused(api: Api, name: str | None) -> None:
    model_id = await api.model()
    for seq_id, kind in enumerate(("save_weights", "save_weights_for_sampler"), start=1):
        result = await save(api, model_id, seq_id, name, kind=kind)
        assert result["category"] == "user", kind
    assert not (api.services.config.data_dir / FOLDER).exists()


@pytest.mark.parametrize("name", ["000080", "step-100", "final", "a.b_C-9", "a" * 128])
async def test_ordinary_names_are_taken(api: Api, name: str) -> None:
    model_id = await api.model()
    assert (await save(api, model_id, 1, name))["path"].endswith(f"/{name}")


@pytest.mark.parametrize(
    "path",
    [
        "tinker://{m}/weights/../weights/ck1",
        "tinker://{m}/weights/ck1/",
        "tinker://{m}/weights/",
        "tinker://{m}/other/ck1",
        "tinker:/{m}/weights/ck1",
        "http://{m}/weights/ck1",
        "tinker://../weights/ck1",
        "tinker://{m}/sampler_weights/ck1",
        "tinker://{m}/weights/nope",
        "/etc/passwd",
        "",
    ],
)
async def test_a_path_that_names_no_checkpoint_is_refused(api: Api, path: str) -> None:
    model_id = await api.model()
    await save(api, model_id, 1)
    response = await api.post(
        "load_weights",
        session_id=await api.session(),
        model_seq_id=0,
        optimizer=False,
        path=path.format(m=model_id),
    )
    assert response.status_code in (404, 422)
    assert response.json()["detail"]


async def test_a_changed_file_is_not_loaded(api: Api) -> None:
    model_id = await trained(api)
    path = (await save(api, model_id, 5))["path"]
    [file] = (api.services.config.data_dir / FOLDER).glob("*/*/*/*/*.npz")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    accepted = await api.ok(
        "load_weights", session_id=await api.session(), model_seq_id=0, path=path, optimizer=False
    )
    assert "is not as it was saved" in await api.failure(accepted, "server")


async def test_the_manifest_lists_every_file_with_hash_and_size(api: Api) -> None:
    await save(api, await trained(api), 5)
    [manifest] = (api.services.config.data_dir / FOLDER).glob("*/*/*/*/manifest.json")
    content = json.loads(manifest.read_text())
    others = {p.name: p.stat().st_size for p in manifest.parent.iterdir() if p != manifest}
    assert {name: file["size_bytes"] for name, file in content["files"].items()} == others
    assert all(len(file["sha256"]) == 64 for file in content["files"].values())


async def test_a_failed_save_leaves_nothing(api: Api) -> None:
    model_id = await api.model()

    async def broken(model_id: str, directory: Path, *, with_optimizer: bool) -> None:
        (directory / "half").write_text("x")
        raise OSError("disk full")

    api.services.backend.save_model = broken  # type: ignore[method-assign]
    assert (await save(api, model_id, 1))["category"] == "server"
    assert list((api.services.config.data_dir / FOLDER).glob("**/*.npz")) == []
    assert list((api.services.config.data_dir / FOLDER).glob("**/half")) == []
    assert (await api.get("checkpoints")).json()["checkpoints"] == []


async def test_a_checkpoint_that_is_not_on_record_leaves_nothing(api: Api) -> None:
    model_id = await api.model()
    put = api.services.checkpoints._metadata.put_checkpoint

    async def refused(checkpoint: Checkpoint) -> None:
        raise StorageFailed("database or disk is full")

    api.services.checkpoints._metadata.put_checkpoint = refused  # type: ignore[method-assign]
    assert (await save(api, model_id, 1))["category"] == "server"
    api.services.checkpoints._metadata.put_checkpoint = put  # type: ignore[method-assign]
    other = (await save(api, model_id, 2, name="other"))["path"]
    await api.services.checkpoints.remove_unrecorded()
    assert len(list((api.services.config.data_dir / FOLDER).glob("**/*.npz"))) == 1
    assert (await api.post("weights_info", tinker_path=other)).status_code == 200


async def test_a_save_succeeds_when_the_disk_is_full_after_its_row(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*args: object, **details: object) -> None:
        raise StorageFailed("database or disk is full")

    monkeypatch.setattr(api.services.checkpoints._audit, "record", refused)
    path = (await save(api, await api.model(), 1))["path"]
    assert (await api.post("weights_info", tinker_path=path)).status_code == 200


def test_a_folder_whose_name_is_not_flushed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path) -> None:
        raise OSError("input/output error")

    folder = tmp_path / "m" / "weights"
    with monkeypatch.context() as patch:
        patch.setattr(flushing, "flush", broken)
        with pytest.raises(OSError, match="input/output"):
            checkpoint_files.make_folder(folder)
    flushed: list[Path] = []
    monkeypatch.setattr(flushing, "flush", flushed.append)
    checkpoint_files.make_folder(folder)
    assert flushed == [tmp_path, folder.parent]


async def test_names_that_a_killed_process_did_not_flush_are_flushed_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = tmp_path / FOLDER / "m:train:0" / "weights"
    model = tmp_path / "recovery" / "m:train:0"
    for folder in (segment / "ck", model):
        folder.mkdir(parents=True)
    flushed: list[Path] = []
    monkeypatch.setattr(flushing, "flush", flushed.append)
    async with serving(tmp_path):
        assert {tmp_path, tmp_path / FOLDER, segment.parent, segment} <= set(flushed)
        assert model.parent in flushed


async def test_a_folder_that_no_checkpoint_names_is_removed_at_start(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        model_id = await api.model()
        path = (await save(api, model_id, 1))["path"]
    place = tmp_path / FOLDER / model_id / "weights"
    left = place / "ck1" / "0123456789ab"
    left.mkdir()
    async with serving(tmp_path) as api:
        assert not left.exists()
        assert (await api.post("weights_info", tinker_path=path)).status_code == 200
        assert len(list(place.glob("*/*"))) == 1


async def test_folders_of_models_that_the_database_does_not_know_stay(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER / "m:train:0" / "weights" / "ck" / "0123456789ab"
    folder.mkdir(parents=True)
    async with serving(tmp_path):
        assert folder.exists()


async def test_half_written_folders_are_removed_at_start(tmp_path: Path) -> None:
    half = tmp_path / FOLDER / "m:train:0" / "weights" / "ck" / ".tmp-1"
    half.mkdir(parents=True)
    async with serving(tmp_path):
        assert not half.exists()


async def test_loading_the_optimizer_from_sampler_weights_is_refused(api: Api) -> None:
    model_id = await trained(api)
    path = (await save(api, model_id, 5, kind="save_weights_for_sampler"))["path"]
    accepted = await api.ok(
        "load_weights", session_id=await api.session(), model_seq_id=0, path=path, optimizer=True
    )
    assert "no optimizer state" in await api.failure(accepted)
    assert await api.loss(await load(api, path), 1) == await api.loss(model_id, 6)


async def test_checkpoints_are_listed_newest_first_with_a_cursor(api: Api) -> None:
    model_id = await api.model()
    for seq_id, name in enumerate(("a", "b", "c"), start=1):
        await save(api, model_id, seq_id, name, user_metadata={"n": seq_id})
    listed = (await api.get("checkpoints", limit=2, offset=0)).json()
    assert [c["checkpoint_id"] for c in listed["checkpoints"]] == ["weights/c", "weights/b"]
    assert listed["cursor"] == {"offset": 0, "limit": 2, "total_count": 3}
    newest = listed["checkpoints"][0]
    assert newest["checkpoint_type"] == "training"
    assert newest["tinker_path"] == f"tinker://{model_id}/weights/c"
    assert newest["user_metadata"] == {"n": "3"}
    assert newest["size_bytes"] > 0
    assert newest["time"].endswith("Z")


async def test_a_run_shows_its_last_checkpoints(api: Api) -> None:
    model_id = await api.model(user_metadata={"renderer_name": "qwen3", "n": 1})
    await save(api, model_id, 1, "a")
    await save(api, model_id, 2, "b")
    await save(api, model_id, 3, "s", kind="save_weights_for_sampler")
    run = (await api.get(f"training_runs/{model_id}")).json()
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/b"
    assert run["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/s"
    assert run["user_metadata"] == {"renderer_name": "qwen3", "n": "1"}
    assert (run["base_model"], run["is_lora"], run["lora_rank"]) == ("fake/tiny", True, 32)
    runs = (await api.get("training_runs", limit=100)).json()
    assert runs["cursor"]["total_count"] == 1
    assert runs["training_runs"] == [run]
    of_run = (await api.get(f"training_runs/{model_id}/checkpoints")).json()["checkpoints"]
    assert [c["checkpoint_id"] for c in of_run] == ["sampler_weights/s", "weights/b", "weights/a"]


async def test_a_deleted_checkpoint_is_gone_with_its_files(api: Api) -> None:
    model_id = await api.model()
    path = (await save(api, model_id, 1))["path"]
    url = f"/api/v1/training_runs/{model_id}/checkpoints/weights/ck1"
    assert (await api.http.delete(url)).status_code == 204
    assert (await api.http.delete(url)).status_code == 404
    assert (await api.post("weights_info", tinker_path=path)).status_code == 404
    assert list((api.services.config.data_dir / FOLDER).glob("**/*.npz")) == []
    assert "path" in await save(api, model_id, 2)


async def test_weights_info_describes_a_checkpoint(api: Api) -> None:
    path = (await save(api, await trained(api), 5))["path"]
    info = await api.ok("weights_info", tinker_path=path)
    assert (info["base_model"], info["is_lora"], info["lora_rank"]) == ("fake/tiny", True, 8)


async def test_a_ttl_is_shown_changed_and_cleared(api: Api) -> None:
    model_id = await api.model()
    await save(api, model_id, 1, ttl_seconds=3600)
    url = f"/api/v1/training_runs/{model_id}/checkpoints/weights/ck1/ttl"
    first = (await api.get("checkpoints")).json()["checkpoints"][0]["expires_at"]
    assert (await api.http.put(url, json={"ttl_seconds": 7200})).status_code == 204
    later = (await api.get("checkpoints")).json()["checkpoints"][0]["expires_at"]
    assert later > first
    assert (await api.http.put(url, json={"ttl_seconds": None})).status_code == 204
    assert "expires_at" not in (await api.get("checkpoints")).json()["checkpoints"][0]
    for wrong in (0, -1, 10**12, 1.5, "x"):
        assert (await api.http.put(url, json={"ttl_seconds": wrong})).status_code == 422


async def test_an_expired_checkpoint_is_not_served_and_its_name_is_free(api: Api) -> None:
    model_id = await api.model()
    path = (await save(api, model_id, 1, ttl_seconds=3600))["path"]
    await api.services.database.write("UPDATE checkpoints SET expires_at = created_at")
    assert (await api.post("weights_info", tinker_path=path)).status_code == 404
    assert (await api.get("checkpoints")).json()["cursor"]["total_count"] == 0
    assert (await save(api, model_id, 2))["path"] == path
    await api.services.checkpoints.remove_expired()
    assert (await api.post("weights_info", tinker_path=path)).status_code == 200


async def test_expired_checkpoints_are_removed_from_disk(api: Api) -> None:
    await save(api, await api.model(), 1, ttl_seconds=3600)
    await api.services.database.write("UPDATE checkpoints SET expires_at = created_at")
    await api.services.checkpoints.remove_expired()
    assert list((api.services.config.data_dir / FOLDER).glob("**/*.npz")) == []


async def test_another_users_checkpoint_does_not_exist(api: Api) -> None:
    bob = api.as_user("bob")
    model_id = await api.model()
    path = (await save(api, model_id, 1))["path"]
    session_id = await bob.session()
    body = {"session_id": session_id, "model_seq_id": 0, "path": path, "optimizer": False}
    assert (await bob.post("load_weights", **body)).status_code == 404
    sampling = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": path}
    assert (await bob.post("create_sampling_session", **sampling)).status_code == 404
    assert (await bob.post("weights_info", tinker_path=path)).status_code == 404
    assert (await bob.get(f"training_runs/{model_id}")).status_code == 404
    assert (await bob.get(f"training_runs/{model_id}/checkpoints")).status_code == 404
    assert (await bob.get("checkpoints")).json()["checkpoints"] == []
    assert (await bob.get("training_runs")).json()["training_runs"] == []
    url = f"/api/v1/training_runs/{model_id}/checkpoints/weights/ck1"
    assert (await bob.http.delete(url)).status_code == 404
    assert (await bob.http.put(f"{url}/ttl", json={"ttl_seconds": 3600})).status_code == 404
    assert (await api.post("weights_info", tinker_path=path)).status_code == 200
