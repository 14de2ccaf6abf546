"""Bugs of the kind that a simulation must find, each planted by replacing a function of the
service for the length of a run."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any
from unittest.mock import patch

from tests.simulation import sqlite
from tests.simulation.drawing import generate
from tests.simulation.engine import SimulatedEngine, SmallFakeBackend
from tests.simulation.run import run_schedule
from tests.simulation.schedule import Schedule
from tinkercloud import flushing
from tinkercloud.core.lane import LaneOrder
from tinkercloud.core.lanes import wait_for_event
from tinkercloud.core.outcome_recorder import OutcomeRecorder
from tinkercloud.core.task_manager import TaskManager
from tinkercloud.errors import VersionLost
from tinkercloud.services.captures.capture_recorder import CaptureRecorder
from tinkercloud.services.models.model_service import ModelService
from tinkercloud.services.models.sampling_service import SamplingService
from tinkercloud.services.recovery.recovery import Recovery
from tinkercloud.services.recovery.snapshots import Snapshots
from tinkercloud.storage.captures import CaptureStorage
from tinkercloud.storage.futures import FuturesStorage
from tinkercloud.storage.journal import JournalStorage

IDLES_SOON_S = 60.0

Replacement = tuple[object, str, Any]
Bug = Replacement | list[Replacement]


def _acknowledged_before_commit() -> Replacement:
    plain = FuturesStorage.add

    async def add(self: Any, *args: Any, **options: Any) -> None:
        task = asyncio.ensure_future(plain(self, *args, **options))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.sleep(0)

    return FuturesStorage, "add", add


def _commit_without_flush() -> Replacement:
    plain = sqlite.Connection.execute

    def execute(self: Any, sql: str, values: Any = ()) -> Any:
        return plain(self, sql.replace("synchronous = FULL", "synchronous = NORMAL"), values)

    return sqlite.Connection, "execute", execute


def _checkpoint_without_flush() -> Replacement:
    return flushing, "flush", lambda path: None


def _number_runs_twice() -> Replacement:
    async def find(self: Any, dedup_key: str) -> None:
        return None

    return FuturesStorage, "find", find


def _order_of_arrival() -> Replacement:
    """Whatever their numbers are: each gets the next one."""
    plain = LaneOrder.push

    def push(self: Any, seq_id: int, item: Any, *, is_chunk: bool) -> None:
        plain(self, self._next + len(self), item, is_chunk=is_chunk)

    return LaneOrder, "push", push


def _result_given_before_record() -> list[Replacement]:
    plain_put, plain_wait = OutcomeRecorder.put, TaskManager.wait

    async def put(self: Any, pending: Any) -> bool:
        pending.finished.set()
        await asyncio.sleep(0.05)
        return await plain_put(self, pending)

    async def wait(self: Any, request_id: str, user: str, hold_s: float) -> Any:
        pending = self._requests.find(request_id)
        if pending is None or pending.ticket.user != user:
            return await plain_wait(self, request_id, user, hold_s)
        await wait_for_event(pending.finished, hold_s)
        return pending.outcome

    return [(OutcomeRecorder, "put", put), (TaskManager, "wait", wait)]


def _refused_after_acknowledged() -> Replacement:
    """In two writes, between which a process may end."""

    async def refuse(self: Any, ticket: Any, error: Exception) -> str:
        async def work() -> Any:
            raise error

        pending, is_new = await self._requests.accept(ticket, None)
        if is_new:
            self._start(pending, work)
        return pending.request_id

    return TaskManager, "refuse", refuse


def _journal_cut_too_far() -> Replacement:
    plain = JournalStorage.put_snapshot

    async def put_snapshot(self: Any, snapshot: Any) -> None:
        await plain(self, snapshot)
        await self._database.write(
            "DELETE FROM operations WHERE model_id = ? AND position <= ?",
            *(snapshot.model_id, snapshot.position + 1),
        )

    return JournalStorage, "put_snapshot", put_snapshot


def _snapshot_is_one_behind() -> Replacement:
    plain = JournalStorage.put_snapshot

    async def put_snapshot(self: Any, snapshot: Any) -> None:
        await plain(self, replace(snapshot, position=snapshot.position - 1))

    return JournalStorage, "put_snapshot", put_snapshot


def _snapshot_without_lost_versions() -> Replacement:
    """Where the engine ends between a snapshot's state and the versions that belong to it."""
    plain = Snapshots.keep_version

    async def keep_version(self: Any, *args: Any) -> None:
        with suppress(VersionLost):
            await plain(self, *args)

    return Snapshots, "keep_version", keep_version


def _snapshot_is_not_waited_for() -> Replacement:
    """Where a model is brought back from the one that it replaces."""

    async def settle(self: Any, key: Any) -> None:
        return

    return Snapshots, "settle", settle


def _gradient_left_out() -> Replacement:
    plain = SmallFakeBackend.restore_state

    async def restore_state(self: Any, model_id: str, *args: Any) -> None:
        await plain(self, model_id, *args)
        self._models[model_id] = replace(self._models[model_id], gradient=None)

    return SmallFakeBackend, "restore_state", restore_state


def _replay_leaves_one_out() -> Replacement:
    plain = Recovery._do_again

    async def do_again(self: Any, operation: Any, base_model: str) -> None:
        if operation.kind != "OptimStep" or operation.position % 2:
            await plain(self, operation, base_model)

    return Recovery, "_do_again", do_again


def _sampler_follows_its_model() -> Replacement:
    plain = SamplingService.publish_model

    async def publish_model(self: Any, model: Any, number: int, kind: Any) -> str:
        sampler_id = await plain(self, model, number, kind)
        entries = self._versions._versions._entries
        for key in [each for each in entries if each.startswith("snapshot|")]:
            newest = entries[f"snapshot|{sampler_id}"] if kind == "snapshot" else None
            if newest is not None and key.startswith(f"snapshot|{model.session_id}"):
                entries[key] = newest
        return sampler_id

    return SamplingService, "publish_model", publish_model


def _version_is_not_released() -> Replacement:
    async def release(self: Any, version: str) -> None:
        return

    return SimulatedEngine, "release", release


def _results_of_others() -> Replacement:
    plain = TaskManager.wait

    async def wait(self: Any, request_id: str, user: str, hold_s: float) -> Any:
        pending = self._requests.find(request_id)
        return await plain(self, request_id, pending.ticket.user if pending else user, hold_s)

    return TaskManager, "wait", wait


def _deleted_model_is_found() -> Replacement:
    """Where it is looked up while it is deleted."""

    def changed(self: Any, user: str, model_id: str) -> None:
        self._live.pop((user, model_id), None)

    return ModelService, "_changed", changed


def _turn_in_pieces() -> Replacement:
    plain = CaptureStorage.add_turn

    class Pieces:
        def __init__(self, database: Any):
            self._database = database

        async def write_all(self, *statements: Any) -> None:
            for sql, values in statements:
                await self._database.write(sql, *values)

    async def add_turn(self: Any, turn: Any) -> None:
        pieces: Any = Pieces(self._database)
        await plain(CaptureStorage(pieces), turn)

    return CaptureStorage, "add_turn", add_turn


def _turn_told_before_it_is_kept() -> Replacement:
    async def finished(self: Any, turn: Any) -> None:
        task = asyncio.ensure_future(self._captures.add_turn(self._turn(turn)))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    return CaptureRecorder, "finished", finished


PLANTED: dict[str, Callable[[], Bug]] = {
    "acknowledged before commit": _acknowledged_before_commit,
    "commit without flush": _commit_without_flush,
    "checkpoint without flush": _checkpoint_without_flush,
    "number runs twice": _number_runs_twice,
    "order of arrival": _order_of_arrival,
    "result given before record": _result_given_before_record,
    "refused after acknowledged": _refused_after_acknowledged,
    "journal cut too far": _journal_cut_too_far,
    "snapshot is one behind": _snapshot_is_one_behind,
    "snapshot without lost versions": _snapshot_without_lost_versions,
    "snapshot is not waited for": _snapshot_is_not_waited_for,
    "gradient left out": _gradient_left_out,
    "replay leaves one out": _replay_leaves_one_out,
    "sampler follows its model": _sampler_follows_its_model,
    "version is not released": _version_is_not_released,
    "results of others": _results_of_others,
    "deleted model is found": _deleted_model_is_found,
    "turn in pieces": _turn_in_pieces,
    "turn told before it is kept": _turn_told_before_it_is_kept,
}


def _ends_as_a_state_is_written(schedule: Schedule) -> bool:
    return any(crash.trigger == "answered" and crash.kind == "engine" for crash in schedule.aimed)


def _offloads_models(schedule: Schedule) -> bool:
    """As they idle, which takes a snapshot beside one that may be underway."""
    return schedule.idle_model_s < IDLES_SOON_S


def _deletes_what_is_new(schedule: Schedule) -> bool:
    steps = (step for program in schedule.programs for step in program)
    return any(step.kind == "delete_model" and step.target == -1 for step in steps)


def _intrudes(schedule: Schedule) -> bool:
    steps = [step.kind for program in schedule.programs for step in program]
    return steps.count("intrude") > 1


def _ends_within_captures(schedule: Schedule) -> bool:
    return bool(schedule.at_awaits)


CAN_SHOW: dict[str, Callable[[Schedule], bool]] = {
    "results of others": _intrudes,
    "version is not released": _offloads_models,
    "order of arrival": lambda schedule: schedule.outage is not None,
    "refused after acknowledged": _deletes_what_is_new,
    "snapshot without lost versions": _ends_as_a_state_is_written,
    "snapshot is not waited for": _offloads_models,
    "deleted model is found": _deletes_what_is_new,
    "turn in pieces": _ends_within_captures,
    "turn told before it is kept": _ends_within_captures,
}
"""The schedules that are tried with a bug which few show; of others all are."""


def seeds_for(name: str, num_schedules: int) -> Iterator[int]:
    """Of schedules that are worth a try with the bug, among so many."""
    can_show = CAN_SHOW.get(name)
    return (n for n in range(num_schedules) if can_show is None or can_show(generate(n)))


@contextmanager
def planted(*names: str) -> Iterator[Counter[str]]:
    """How often what the bugs replace was called. Raises AssertionError where a bug does not fit
    the service any more: a schedule that fails for that shows nothing."""
    num_calls, misfits = Counter[str](), list[str]()
    with ExitStack() as stack:
        for name in names:
            bug = PLANTED[name]()
            for owner, attribute, new in bug if isinstance(bug, list) else [bug]:
                watched = _watched(f"{name}: {attribute}", new, num_calls, misfits)
                num_calls[f"{name}: {attribute}"] = 0
                stack.enter_context(patch.object(owner, attribute, watched))
        yield num_calls
    assert not misfits, misfits[0]


def _watched(
    name: str, function: Callable[..., Any], num_calls: Counter[str], misfits: list[str]
) -> Callable[..., Any]:
    @contextmanager
    def call() -> Iterator[None]:
        num_calls[name] += 1
        try:
            yield
        except (AttributeError, NameError, TypeError) as error:
            misfits.append(f"{name}: {error!r}")
            raise

    @wraps(function)
    def plain(*args: Any, **options: Any) -> Any:
        with call():
            return function(*args, **options)

    @wraps(function)
    async def waiting(*args: Any, **options: Any) -> Any:
        with call():
            return await function(*args, **options)

    return waiting if iscoroutinefunction(function) else plain


def finds(name: str, seed: int) -> bool:
    """Whether the schedule of that seed fails with the bug, and not without it."""
    schedule = generate(seed)
    with planted(name):
        is_found = bool(run_schedule(schedule).failures)
    return is_found and not run_schedule(schedule).failures
