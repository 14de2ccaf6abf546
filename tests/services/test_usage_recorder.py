"""Counts of tokens between memory and the database."""

import asyncio
from pathlib import Path

import pytest

from tinkercloud.services.accounts.usage_recorder import UsageRecorder
from tinkercloud.storage.database import Database
from tinkercloud.storage.metadata import Sampler
from tinkercloud.storage.usage_storage import UsageStorage


async def test_counts_are_written_once_where_their_flush_is_cancelled(tmp_path: Path) -> None:
    database = await Database.open(tmp_path)
    storage = UsageStorage(database)
    recorder = UsageRecorder(storage)
    recorder.abandoned(Sampler("s:sample:0", "ann", "s", "base", "fake/tiny"), 3, 5)
    flush = asyncio.ensure_future(recorder.flush())
    await asyncio.sleep(0)  # until its row is queued
    flush.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flush
    await recorder.flush()
    await database.probe()  # a write behind those that are queued
    counted = {key.kind: number for key, number in await storage.tokens("ann", 0, 1e11)}
    await database.close()
    assert counted == {"prefill": 3, "sample": 5}
