"""Samples kept for training on them: whose they are, what they take, when they go."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from tinkercloud.core.types import SampledSequence, SampleOutput, SampleRequest, SamplingParams
from tinkercloud.storage.database import Database
from tinkercloud.storage.sample_records import (
    SampleOwner,
    SampleRecordStorage,
    num_bytes,
    request_of,
    sequence_id,
)

ANN = SampleOwner("ann", "s1", "s1:sample:0")
REQUEST = SampleRequest(np.array([1, 2, 3], np.int32), 2, SamplingParams(4, seed=2**64 - 1))
OUTPUT = SampleOutput(
    (
        SampledSequence(np.array([7, 8], np.int32), np.array([-0.5, -1], np.float32), "stop"),
        SampledSequence(np.array([9], np.int32), np.array([-2], np.float32), "length"),
    )
)
SIZE = num_bytes(REQUEST, OUTPUT)


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    database = await Database.open(tmp_path)
    yield database
    await database.close()


@pytest.fixture
def records(database: Database) -> SampleRecordStorage:
    return SampleRecordStorage(database)


async def num_rows(database: Database) -> tuple[int, int]:
    counts = [
        await database.one(f"SELECT COUNT(*) AS num FROM {table}")
        for table in ("recorded_samples", "recorded_sequences")
    ]
    return counts[0]["num"], counts[1]["num"]


async def test_a_sequence_comes_back_as_it_was_sampled(records: SampleRecordStorage) -> None:
    await records.add("r", ANN, REQUEST, OUTPUT)
    found = await records.sequences("ann", "s1", ["r:0", "r:1", "r:2"])
    assert sorted(found) == ["r:0", "r:1"]
    assert found["r:0"].prompt.tolist() == [1, 2, 3]
    assert found["r:0"].tokens.tolist() == [7, 8]
    assert found["r:0"].logprobs.tolist() == [-0.5, -1]
    assert found["r:1"].tokens.tolist() == [9]


async def test_the_same_request_twice_is_one_record(
    records: SampleRecordStorage, database: Database
) -> None:
    for _ in range(2):
        await records.add("r", ANN, REQUEST, OUTPUT)
    assert await num_rows(database) == (1, 2)
    assert await records.total_bytes("ann") == SIZE == 3 * 4 + 3 * 8


@pytest.mark.parametrize(("user", "session"), [("bob", "s1"), ("ann", "s2")])
async def test_nobody_else_and_no_other_session_gets_a_sequence(
    records: SampleRecordStorage, user: str, session: str
) -> None:
    await records.add("r", ANN, REQUEST, OUTPUT)
    assert not await records.sequences(user, session, ["r:0"])
    assert bool(await records.samples(user, ["r"])) == (user == "ann")


async def test_what_was_unused_longest_makes_room(
    records: SampleRecordStorage, database: Database
) -> None:
    for name in "abcd":
        await records.add(name, ANN, REQUEST, OUTPUT)
    await records.add("other", SampleOwner("bob", "s9", "x"), REQUEST, OUTPUT)
    await records.renew("ann", ["a"])
    await records.shrink("ann", 2 * SIZE)
    assert sorted(await records.samples("ann", "abcd")) == ["a", "d"]
    assert list(await records.samples("bob", ["other"])) == ["other"]
    assert await num_rows(database) == (3, 6)


async def test_use_renews_a_sample_and_expiry_takes_its_sequences_along(
    records: SampleRecordStorage, database: Database
) -> None:
    for name in "ab":
        await records.add(name, ANN, REQUEST, OUTPUT)
    await database.write("UPDATE recorded_samples SET used_at = used_at - 100")
    await records.renew("bob", ["b"])  # not his
    await records.renew("ann", ["a"])
    await records.expire(50)
    assert sorted(await records.samples("ann", "ab")) == ["a"]
    assert await num_rows(database) == (1, 2)


async def test_the_samples_of_a_session_go_together(
    records: SampleRecordStorage, database: Database
) -> None:
    await records.add("a", ANN, REQUEST, OUTPUT)
    await records.add("b", SampleOwner("ann", "s2", "x"), REQUEST, OUTPUT)
    await records.delete_session("ann", "s1")
    assert sorted(await records.samples("ann", "ab")) == ["b"]
    assert await num_rows(database) == (1, 2)


@pytest.mark.parametrize("request_id", ["sample-1", "with:colons:in-it"])
def test_a_sequence_id_names_its_request(request_id: str) -> None:
    assert request_of(sequence_id(request_id, 12)) == request_id
