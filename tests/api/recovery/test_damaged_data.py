"""A data folder that is not as the server left it: what is sound goes on, the rest is named."""

import logging
import shutil
from pathlib import Path

import pytest

from tests.api.harness import Api, serving
from tests.api.recovery.test_recovery import goes_on, train
from tinkercloud.services.checkpoints import checkpoint_files
from tinkercloud.services.recovery import run_archive


async def snapshot_of(api: Api, model_id: str, position: int) -> Path:
    await api.services.snapshots.take(("ann", model_id), position)
    await api.services.snapshots.settled()
    folder = api.services.snapshots.files.folder(model_id)
    return max(folder.glob("snapshot-*"), key=lambda path: path.stat().st_mtime_ns)


def cut_short(snapshot: Path) -> None:
    largest = max(snapshot.iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


async def test_a_snapshot_that_was_half_written_goes_and_the_model_goes_on(tmp_path: Path) -> None:
    """From the one before, and the operations after that."""
    async with serving(tmp_path / "a") as api:
        model_id = await api.model()
        number = await train(api, model_id, 1, steps=1)
        whole = await snapshot_of(api, model_id, number)
        number = await train(api, model_id, number, steps=1)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        place = tmp_path / "b/recovery" / model_id
        half = place / f"{checkpoint_files.TEMPORARY_PREFIX}half"
        shutil.copytree(whole, half)
        cut_short(half)
        expected = await goes_on(api, model_id, number)
        async with serving(tmp_path / "b") as server:
            assert not half.exists()
            again = Api(server.app, api.keys, api.key)
            assert await goes_on(again, model_id, number) == expected


async def test_a_model_whose_snapshot_is_damaged_comes_back_by_what_the_archive_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the snapshot before it, and where that is damaged too by all operations."""
    monkeypatch.setattr(run_archive, "SNAPSHOT_EVERY_S", 0.0)
    caplog.set_level(logging.INFO)
    async with serving(tmp_path / "a") as api:
        model_id = await api.model()
        places = []
        number = 1
        for _ in range(2):
            number = await train(api, model_id, number, steps=1)
            snapshot = await snapshot_of(api, model_id, number)
            places.append(snapshot.relative_to(tmp_path / "a"))
        number = await train(api, model_id, number, steps=1)
        for num_damaged in (1, 2):
            folder = tmp_path / f"damaged {num_damaged}"
            shutil.copytree(tmp_path / "a", folder)
            for place in places[-num_damaged:]:
                cut_short(folder / place)
        expected = await goes_on(api, model_id, number)
        for num_damaged, kept in ((1, "the snapshot of 4"), (2, "no snapshot")):
            async with serving(tmp_path / f"damaged {num_damaged}") as server:
                again = Api(server.app, api.keys, api.key)
                assert await goes_on(again, model_id, number) == expected
            assert f"is back: {kept} and" in caplog.text


async def test_a_snapshot_that_is_damaged_is_named_with_advice_and_other_models_go_on(
    tmp_path: Path,
) -> None:
    """Where nothing from before it is kept."""
    async with serving(tmp_path / "a", archive_bytes=0) as api:
        session = await api.session()
        damaged, sound = [await api.model(session, number) for number in range(2)]
        for model_id in (damaged, sound):
            number = await train(api, model_id, 1, steps=1)
            snapshot = await snapshot_of(api, model_id, number)
            if model_id == damaged:
                place = snapshot.relative_to(tmp_path / "a")
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        cut_short(tmp_path / "b" / place)
        expected = await goes_on(api, sound, number)
        async with serving(tmp_path / "b", archive_bytes=0) as server:
            again = Api(server.app, api.keys, api.key)
            text = await again.failure(await again.forward_backward(damaged, number), "server")
            assert f"the snapshot of {damaged} cannot be read" in text
            assert "go on from your last checkpoint, and see that the disk is sound" in text
            assert await goes_on(again, sound, number) == expected
