"""A turn of a capture session is on record with all that belongs to it, or not at all."""

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from tinkercloud.storage.capture_rewards import CaptureRewardStorage, Delivery
from tinkercloud.storage.captures import Capture, CapturedSample, CapturedTurn, CaptureStorage
from tinkercloud.storage.database import Database

SAMPLE = CapturedSample(
    *(0, "answered", np.array([7, 2], np.int32), np.array([-0.5, -1.0], np.float32)),
    *("stop", {"role": "assistant", "content": "h"}),
)
TURN = CapturedTurn(
    *("t1", "cap-1", "ann", None, None, None, "asked", np.array([1, 2], np.int32)),
    *([{"role": "user", "content": "b"}], {"model": "fake/tiny"}, (SAMPLE,)),
)


async def test_a_turn_that_cannot_be_counted_leaves_nothing(tmp_path: Path) -> None:
    database = await Database.open(tmp_path)
    captures = CaptureStorage(database)
    await captures.add(Capture("cap-1", "ann", {}, 1e6, 0.0, 0.0))
    await database.write(
        "CREATE TRIGGER refused BEFORE UPDATE ON captures BEGIN SELECT RAISE(ABORT, 'no'); END"
    )
    with pytest.raises(sqlite3.IntegrityError):
        await captures.add_turn(TURN)
    await database.write("DROP TRIGGER refused")
    assert await database.all("SELECT * FROM capture_samples") == []
    capture = await captures.get("ann", "cap-1")
    assert capture is not None
    assert (await captures.turns(capture), capture.num_turns) == ([], 0)
    await captures.add_turn(TURN)
    capture = await captures.get("ann", "cap-1")
    assert capture is not None
    assert (capture.num_turns, capture.num_bytes) == (1, TURN.num_bytes)
    await database.close()


async def test_of_a_session_that_is_gone_nothing_is_kept(tmp_path: Path) -> None:
    database = await Database.open(tmp_path)
    captures, rewards = CaptureStorage(database), CaptureRewardStorage(database)
    await captures.add(Capture("cap-1", "ann", {}, 1e6, 0.0, 0.0))
    for is_there in (True, False):
        for value in (0.5, 1.0):  # the second one replaces the first
            await rewards.put("cap-1", "capture", "judge", value)
        await rewards.close("cap-1", "an episode")
        await rewards.put_delivery("cap-1", Delivery("t1:0", 1, None, None))
        assert await rewards.by_target("cap-1") == ({"capture": 1.0} if is_there else {})
        assert await rewards.closed("cap-1") == (frozenset(["an episode"] * is_there))
        assert list(await rewards.deliveries("cap-1")) == ["t1:0"] * is_there
        await captures.delete("ann", "cap-1")
    await database.close()
