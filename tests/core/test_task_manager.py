"""Outcomes are written whatever happens to the work."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.storage.counting import commits_of
from tests.waiting import async_wait_for
from tinkercloud.core import outcome_recorder, task_manager
from tinkercloud.core.task_manager import TaskManager
from tinkercloud.errors import FutureUnknown, ServerFault, StorageFailed, UserError
from tinkercloud.storage.database import Database
from tinkercloud.storage.futures import FuturesStorage, Outcome, Ticket, completed_json

TICKET = Ticket("ann", "OptimStep", "key")


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    database = await Database.open(tmp_path)
    yield database
    await database.close()


@pytest.fixture
async def tasks(database: Database) -> AsyncIterator[TaskManager]:
    tasks = TaskManager(FuturesStorage(database), gap_grace_s=0.1)
    await tasks.start()
    yield tasks
    await tasks.close()


async def done() -> Outcome:
    return completed_json({"x": 1})


async def forever() -> Outcome:
    await asyncio.Event().wait()
    raise AssertionError


def error_of(outcome: Outcome | None) -> dict[str, str]:
    assert outcome is not None
    assert outcome.status == "failed"
    return json.loads(outcome.body)


async def test_work_that_raises_our_error_fails_with_its_category(tasks: TaskManager) -> None:
    for error in (UserError("yours"), ServerFault("ours")):

        async def work(error: Exception = error) -> Outcome:
            raise error

        request_id = await tasks.submit(Ticket("ann", "OptimStep"), work)
        error_body = error_of(await tasks.wait(request_id, "ann", 5))
        assert error_body == {"error": str(error), "category": error.category}


async def test_cancelled_work_still_has_an_outcome(tasks: TaskManager) -> None:
    async def work() -> Outcome:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return await forever()

    request_id = await tasks.submit(TICKET, work)
    assert error_of(await tasks.wait(request_id, "ann", 5))["category"] == "server"


async def test_closing_writes_outcomes_for_all_that_is_pending(
    tasks: TaskManager, database: Database
) -> None:
    running = await tasks.submit(Ticket("ann", "Sample"), forever)
    lane = [
        await tasks.submit_in_lane(Ticket("ann", "OptimStep", None, "m", n), forever)
        for n in (1, 2)
    ]
    held = await tasks.submit_in_lane(Ticket("ann", "ForwardBackward", None, "n", 9), forever)
    await tasks.close()
    assert tasks.num_pending == 0
    for request_id in (running, *lane, held):
        outcome = await FuturesStorage(database).outcome(request_id, "ann")
        assert "stopped" in error_of(outcome)["error"]
    with pytest.raises(ServerFault):
        await tasks.submit(TICKET, done)


async def test_every_task_has_a_name(tasks: TaskManager) -> None:
    await tasks.submit(Ticket("ann", "Sample"), forever)
    await tasks.submit_in_lane(Ticket("ann", "OptimStep", None, "m", 1), forever)
    names = [task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}]
    assert {name.split()[0] for name in names} >= {"run", "lane", "database"}


async def test_a_twin_waits_for_the_acknowledgement_of_the_first(tasks: TaskManager) -> None:
    ids = await asyncio.gather(*(tasks.submit(TICKET, done) for _ in range(5)))
    assert len(set(ids)) == 1


async def test_a_failed_acknowledgement_leaves_nothing_behind(
    tasks: TaskManager, database: Database
) -> None:
    await database.write("ALTER TABLE futures RENAME TO gone")
    results = await asyncio.gather(
        *(tasks.submit(TICKET, done) for _ in range(3)), return_exceptions=True
    )
    assert all(isinstance(result, Exception) for result in results)
    assert tasks.num_pending == 0
    await database.write("ALTER TABLE gone RENAME TO futures")
    request_id = await tasks.submit(TICKET, done)
    assert (await tasks.wait(request_id, "ann", 5)) == await done()


async def test_a_lane_goes_on_when_the_database_cannot_take_a_result(
    tasks: TaskManager, database: Database
) -> None:
    proceed = asyncio.Event()

    async def work() -> Outcome:
        await proceed.wait()
        return await done()

    ids = [
        await tasks.submit_in_lane(Ticket("ann", "OptimStep", None, "m", n), work) for n in (1, 2)
    ]
    await database.write("ALTER TABLE futures RENAME TO gone")
    waiting = [asyncio.create_task(tasks.wait(request_id, "ann", 5)) for request_id in ids]
    await asyncio.sleep(0)
    proceed.set()
    assert await asyncio.gather(*waiting) == [await done(), await done()]
    await database.write("ALTER TABLE gone RENAME TO futures")


async def test_a_refusal_is_acknowledged_with_its_failure(
    tasks: TaskManager, database: Database
) -> None:
    """In one write: whatever ends the process, nobody reads that an effect was lost."""
    commits = commits_of(database)
    ids = await asyncio.gather(*(tasks.refuse(TICKET, UserError("no")) for _ in range(2)))
    assert len(set(ids)) == 1
    assert len(commits) == 1
    assert error_of(await tasks.wait(ids[0], "ann", 0)) == {"error": "no", "category": "user"}
    assert tasks.num_pending == 0


async def ended_on_a_full_disk(
    tasks: TaskManager, database: Database, num_lanes: int
) -> tuple[list[str], Outcome]:
    """One operation of each lane: their ids, and the outcome of each, which the disk has no room
    for."""
    proceed = asyncio.Event()

    async def work() -> Outcome:
        await proceed.wait()
        return completed_json({"x": "y" * 100_000})

    tickets = [Ticket("ann", "OptimStep", f"k{i}", f"m{i}", 1) for i in range(num_lanes)]
    request_ids = [await tasks.submit_in_lane(ticket, work) for ticket in tickets]
    await fill_disk(database)
    proceed.set()
    return request_ids, await work()


async def test_outcomes_of_a_full_disk_are_given_when_they_are_on_record(
    tasks: TaskManager, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcome_recorder, "RECORD_AGAIN_S", 0.05)
    (request_id,), outcome = await ended_on_a_full_disk(tasks, database, 1)
    await until_late(tasks, request_id)
    assert await tasks.wait(request_id, "ann", 0.1) is None
    with pytest.raises(StorageFailed, match=r"full.*make room"):
        await tasks.submit(Ticket("ann", "Sample", "k" * 100_000), done)
    assert tasks.num_pending == 1
    waiting = asyncio.create_task(tasks.wait(request_id, "ann", 5))
    await make_room(database)
    assert await waiting == outcome
    assert await FuturesStorage(database).outcome(request_id, "ann") == outcome
    assert await tasks.wait(request_id, "ann", 5) == outcome
    assert tasks.delay_of(request_id) is None


async def test_outcomes_of_several_lanes_that_wait_for_room_are_all_on_record_before_they_are_given(
    tasks: TaskManager, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcome_recorder, "RECORD_AGAIN_S", 0.05)
    request_ids, outcome = await ended_on_a_full_disk(tasks, database, 4)
    for request_id in request_ids:
        await until_late(tasks, request_id)
    assert await tasks.wait(request_ids[-1], "ann", 0.1) is None
    await make_room(database)
    for request_id in request_ids:
        assert await tasks.wait(request_id, "ann", 5) == outcome
        assert await FuturesStorage(database).outcome(request_id, "ann") == outcome


async def test_an_outcome_that_waits_for_room_is_recorded_by_a_stop(
    tasks: TaskManager, database: Database
) -> None:
    big, proceed = completed_json({"x": "y" * 100_000}), asyncio.Event()

    async def work() -> Outcome:
        await proceed.wait()
        return big

    request_id = await tasks.submit(Ticket("ann", "OptimStep"), work)
    await fill_disk(database)
    proceed.set()
    await until_late(tasks, request_id)
    await make_room(database)
    await tasks.close()
    assert await FuturesStorage(database).outcome(request_id, "ann") == big


async def test_the_keeper_hears_that_an_operation_is_not_on_record(
    tasks: TaskManager, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resume(ticket: Ticket, request: bytes) -> Any:
        raise AssertionError

    heard: list[Ticket] = []
    monkeypatch.setattr(tasks.lanes.recovery, "unrecorded", heard.append)
    tasks.journal("OptimStep", resume, lambda ticket, outcome: True)
    proceed = asyncio.Event()

    async def work() -> Outcome:
        await proceed.wait()
        return completed_json({"x": "y" * 100_000})

    ticket = Ticket("ann", "OptimStep", "k", "m", 1)
    await tasks.submit_in_lane(ticket, work, b"{}")
    await fill_disk(database)
    proceed.set()
    await async_wait_for("the keeper has heard", lambda: heard)
    assert heard == [ticket]
    await make_room(database)


async def until_late(tasks: TaskManager, request_id: str) -> None:
    await async_wait_for(
        "its outcome waits for room",
        lambda: tasks.delay_of(request_id),
        lambda delay: delay == task_manager.NO_ROOM,
    )


async def fill_disk(database: Database) -> None:
    """No page more than there is."""
    await database._writer.execute("PRAGMA max_page_count = 1")


async def make_room(database: Database) -> None:
    await database._writer.execute("PRAGMA max_page_count = 1073741823")


async def test_an_operation_runs_after_the_one_before_it_ended(tasks: TaskManager) -> None:
    events: list[str] = []

    def work(name: str):
        async def run() -> Outcome:
            events.append(f"{name} begins")
            await asyncio.sleep(0.01)
            events.append(f"{name} ends")
            return await done()

        return run

    ids = [
        await tasks.submit_in_lane(Ticket("ann", "OptimStep", None, "m", n), work(str(n)))
        for n in (1, 2)
    ]
    for request_id in ids:
        await tasks.wait(request_id, "ann", 5)
    assert events == ["1 begins", "1 ends", "2 begins", "2 ends"]


async def test_a_lane_that_is_forgotten_is_held_by_one_at_a_time_all_the_same(
    tasks: TaskManager,
) -> None:
    """As when the model of a sampler is freed: one waits for the lane that is forgotten, and
    another asks for it afterwards."""
    inside, most = 0, 0

    async def hold() -> None:
        nonlocal inside, most
        async with tasks.lanes.between_operations("ann", "m"):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.01)
            inside -= 1

    async with tasks.lanes.between_operations("ann", "m"):
        first = asyncio.create_task(hold())
        await asyncio.sleep(0.01)  # it waits
    tasks.lanes.forget("ann", "m")
    await asyncio.gather(first, hold())
    assert most == 1


async def test_nobody_elses_request_can_be_waited_for(tasks: TaskManager) -> None:
    request_id = await tasks.submit(TICKET, forever)
    with pytest.raises(FutureUnknown):
        await tasks.wait(request_id, "bob", 0)
