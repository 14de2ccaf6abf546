"""`tinkercloud backup` and `restore`: what is in them, and what they refuse."""

import asyncio
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.api.harness import Api, serving
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.cli import main
from tinkercloud.config import Config
from tinkercloud.services.checkpoints import backups
from tinkercloud.services.recovery import snapshots
from tinkercloud.storage.database_file import DATABASE_NAME


def backup(data_dir: Path, folder: Path) -> int:
    return main(["backup", str(folder), "--data-dir", str(data_dir)])


def restore(folder: Path, data_dir: Path) -> int:
    return main(["restore", str(folder), "--data-dir", str(data_dir)])


async def saved(api: Api, name: str, seq_id: int = 3) -> tuple[str, str]:
    """A trained model, and the path of its checkpoint."""
    model_id = await api.model()
    await api.train(model_id, 1)
    body = {"model_id": model_id, "path": name, "seq_id": seq_id}
    return model_id, (await api.result(await api.ok("save_weights", **body)))["path"]


async def loss_of(api: Api, path: str) -> float:
    session_id = await api.session()
    body = {"session_id": session_id, "model_seq_id": 0, "path": path, "optimizer": True}
    loaded = await api.result(await api.ok("load_weights", **body))
    return await api.loss(loaded["model_id"], 1)


async def test_a_backup_beside_a_running_server_is_a_moment_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, folder = tmp_path / "data", tmp_path / "backups" / "monday"
    async with serving(data) as api:
        model_id, path = await saved(api, "before")
        expected = await api.loss(model_id, 4)
        assert await asyncio.to_thread(backup, data, folder) == 0
        assert "checkpoints: 1" in capsys.readouterr().out
        _, later = await saved(api, "after")
        keys = api.keys
    assert not folder.with_name("monday.partial").exists()
    assert restore(folder, tmp_path / "restored") == 0
    assert {p.name for p in (tmp_path / "restored").iterdir()} == {"checkpoints", DATABASE_NAME}
    async with serving(tmp_path / "restored") as server:
        api = Api(server.app, keys, keys["ann"])
        assert await loss_of(api, path) == expected
        assert "does not exist" in (await api.post("weights_info", tinker_path=later)).text
        assert await loss_of(api, (await saved(api, "goes-on"))[1]) == pytest.approx(expected)


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_models_in_training_come_back_from_a_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    """Also where a snapshot is replaced while it is copied: the moment is a later one then."""
    monkeypatch.setattr(snapshots, "SHARE", 1e9)  # after each operation
    data, folder = tmp_path / "data", tmp_path / "backup"
    copied = shutil.copytree
    async with serving(data) as api:
        session = await api.session()
        first = await api.model(session)
        await api.train(first, 1)
        saved_at = await api.ok("save_weights", model_id=first, path="one", seq_id=3)
        path = (await api.result(saved_at))["path"]
        load = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
        second = (await api.result(await api.ok("load_weights", **load)))["model_id"]
        await api.train(second, 1)
        await api.services.snapshots.settled()

        def replaced(source: Path, target: Path, **options: bool) -> Path:
            monkeypatch.setattr(shutil, "copytree", copied)
            moved = source.with_name(f"{source.name}0")
            source.rename(moved)
            with sqlite3.connect(data / DATABASE_NAME) as connection:
                connection.execute(
                    "UPDATE snapshots SET directory = ? WHERE directory = ?",
                    (str(moved.relative_to(data)), str(source.relative_to(data))),
                )
            raise FileNotFoundError(source)

        if is_replaced:
            monkeypatch.setattr(shutil, "copytree", replaced)
        assert await asyncio.to_thread(backup, data, folder) == 0
        expected = [await api.loss(model_id, n) for model_id, n in ((first, 4), (second, 3))]
        keys = api.keys
    assert restore(folder, tmp_path / "restored") == 0
    async with serving(tmp_path / "restored") as server:
        api = Api(server.app, keys, keys["ann"])
        assert [
            await api.loss(model_id, n) for model_id, n in ((first, 4), (second, 3))
        ] == expected


async def test_samples_that_were_underway_are_drawn_by_the_restored_server(tmp_path: Path) -> None:
    data, folder = tmp_path / "data", tmp_path / "backup"
    slow = FakeBackend(Config(data_dir=data), latency_s=1000.0)
    async with serving(data, backend=slow) as api:
        underway = await api.sample(await api.sampler(await api.session()))
        assert await asyncio.to_thread(backup, data, folder) == 0
    assert restore(folder, tmp_path / "restored") == 0
    async with serving(tmp_path / "restored") as api:
        assert len((await api.result(underway)).sequences) == 1


async def test_a_checkpoint_that_is_deleted_meanwhile_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, folder = tmp_path / "data", tmp_path / "backup"
    async with serving(data) as api:
        paths = [(await saved(api, name))[1] for name in ("kept", "deleted")]
    copy = backups.copy_database

    def and_delete(source: Path, target: Path) -> list[str]:
        directories = copy(source, target)
        (deleted,) = (each for each in directories if "/deleted/" in each)
        shutil.rmtree(source / deleted)
        return directories

    monkeypatch.setattr(backups, "copy_database", and_delete)
    assert str(backups.back_up(data, folder, lambda _: None)).endswith("meanwhile: 1")
    assert restore(folder, tmp_path / "restored") == 0
    async with serving(tmp_path / "restored") as api:
        listed = (await api.get("checkpoints")).json()["checkpoints"]
        assert [each["tinker_path"] for each in listed] == paths[:1]


def damage_checkpoint(folder: Path) -> None:
    file = next(each for each in folder.rglob("*.*") if each.suffix in (".npz", ".safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def lose_checkpoint(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")


def damage_database(folder: Path) -> None:
    content = bytearray((folder / DATABASE_NAME).read_bytes())
    content[4096:8192] = b"x" * 4096
    (folder / DATABASE_NAME).write_bytes(content)


@pytest.mark.parametrize("harm", [damage_checkpoint, lose_checkpoint, damage_database])
async def test_a_damaged_backup_is_refused_before_anything_is_written(
    tmp_path: Path, harm: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    data, folder = tmp_path / "data", tmp_path / "backup"
    async with serving(data) as api:
        await saved(api, "one")
    assert backup(data, folder) == 0
    harm(folder)
    assert restore(folder, tmp_path / "restored") == 1
    assert str(folder) in capsys.readouterr().err
    assert not (tmp_path / "restored").exists()


async def test_a_damaged_checkpoint_is_not_backed_up_in_silence(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with serving(data) as api:
        await saved(api, "one")
    damage_checkpoint(data)
    assert backup(data, tmp_path / "backup") == 1
    assert not (tmp_path / "backup").exists()


def test_folders_that_are_in_the_way_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert backup(tmp_path / "none", tmp_path / "backup") == 1
    assert "no server's data" in capsys.readouterr().err
    assert restore(tmp_path, tmp_path / "restored") == 1
    assert "not a backup" in capsys.readouterr().err


async def test_nothing_that_is_there_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, folder = tmp_path / "data", tmp_path / "backup"
    async with serving(data):
        pass
    (tmp_path / "backup.partial").mkdir()  # of a backup that was interrupted
    assert backup(data, folder) == 0
    assert backup(data, folder) == 1
    assert "there already" in capsys.readouterr().err
    assert restore(folder, data) == 1
    assert f"not empty: it has {DATABASE_NAME}" in capsys.readouterr().err
