"""What must hold at rest, whatever happened. Each function finds what is wrong, in words."""

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import apsw

from tests.simulation import sqlite
from tests.simulation.archive_invariants import runs_give_the_same_again
from tests.simulation.capture_invariants import (
    captures_are_whole,
    captures_can_be_read,
    chats_differ,
)
from tests.simulation.engine import OUT_OF_MEMORY
from tests.simulation.history import Request
from tests.simulation.oracle import Oracle, Row, difference, state_difference
from tests.simulation.schedule import LITTLE_BYTES
from tests.simulation.wires import Refused, SdkWire
from tinkercloud.backends.fake_model import ModelState, read_state
from tinkercloud.core.lanes import TOO_LATE
from tinkercloud.errors import ServerFault, TinkercloudError
from tinkercloud.services.checkpoints import checkpoint_files
from tinkercloud.services.checkpoints.copy_service import ORIGIN
from tinkercloud.services.models.loss_service import KIND as LOSS
from tinkercloud.services.models.model_service import UNLOAD
from tinkercloud.storage.futures import SAMPLING_KIND

if TYPE_CHECKING:
    from tests.simulation.world import World

CHUNKS = ("ForwardBackward", "Forward")
NUM_ASKED_AGAIN = 6
PUT_AWAY_S = 30.0
"""Of virtual time, for what is between the memory of a server and that of its engine."""
TOO_LATE_TEXT = json.loads(TOO_LATE.body)["error"]
NAMED_FAILURES = (
    re.escape(OUT_OF_MEMORY),
    r"^this needs .* of memory, and .* are left here",
    r"there is no memory to bring it back just now",
    r"the server's data folder cannot be written",
    r"this sample was cancelled by its client",
    r"was underway each of 3 times",
    r"weights version 'fake-version",  # the engine ended at each of the attempts at a sample
    r"the engine process ended each of the 3 times",  # also of a model's return
    r"^model .* does not exist",
    r"^the checkpoint .* does not fit: ",
    r"^the prompt has \d+ tokens; ",
    r"^nothing is on record of sequence ",  # a clock that was set had its time pass
)
_SAMPLED = (
    "SELECT model_id FROM samplers JOIN sessions USING (session_id) WHERE finished_at IS NULL"
)
_NAMED = re.compile("|".join(NAMED_FAILURES))


async def check(world: "World") -> None:
    """Adds to the world's failures."""
    await world.bring_back()
    await world.clean_up()
    rows = recorded(world)
    checks = (
        *acknowledged_is_kept(world, rows),
        *results_never_change(world, rows),
        *one_row_for_each_number(rows),
        *order_is_kept(rows),
        *nothing_of_another_user(world),
        *files_are_whole(world),
        *what_was_deleted_is_gone(world),
        *world.history.wrong,
        *captures_are_whole(world),
    )
    for text in (*checks, *(f"the database refused: {text}" for text in world.connector.refused)):
        world.fail(text)
    await captures_can_be_read(world)
    async for text in asking_again_gives_the_same(world, rows):
        world.fail(text)
    async for text in nothing_is_left_over(world):
        world.fail(text)
    async for text in runs_give_the_same_again(world):
        world.fail(text)
    async for text in equals_the_undisturbed_run(world, rows):
        world.fail(text)


def recorded(world: "World") -> list[Row]:
    """All numbered requests of the database, in the order in which they ran."""
    with_path = apsw.Connection(str(world.disk.folder / "tinkercloud.db"), vfs=sqlite.VFS_NAME)
    rows = with_path.execute(
        "SELECT request_id, user, kind, COALESCE(model_id, sampler_id), seq_id, status, body,"
        " started_at FROM futures WHERE kind NOT IN (?, ?)",
        (UNLOAD, LOSS),
    ).fetchall()
    with_path.close()
    began = [Row(*row[:-1], world.moments.get(row[-1])) for row in rows]
    return sorted(began, key=lambda row: -1.0 if row.place is None else row.place)


def acknowledged_is_kept(world: "World", rows: list[Row]) -> Iterator[str]:
    by_id = {row.request_id: row for row in rows}
    for request in world.history.requests:
        for request_id in request.request_ids:
            text = _kept_wrongly(request, by_id.get(request_id))
            if text is not None:
                yield f"{_named(request)} {text}"
        if request.lost is not None:
            yield f"{_named(request)} was acknowledged, and its poll answered {request.lost}"
    for row in rows:
        if row.status == "pending":
            yield f"a request of {row.owner} {row.seq_id} is pending for ever"
        elif row.seq_id is None and row.kind == SAMPLING_KIND:
            continue  # sent again it is another one
        elif not row.is_refusal and world.history.find(row.owner, row.seq_id) is None:
            yield f"{row.kind} of {row.owner} {row.seq_id} was never sent"


def _kept_wrongly(request: Request, row: Row | None) -> str | None:
    if row is None:
        return "was acknowledged and is not on record"
    if row.status == "pending":
        return "is pending for ever"
    owner = row.owner if request.seq_id is None else request.owner
    same = (row.user, row.owner, row.seq_id) == (request.user, owner, request.seq_id)
    return None if same or row.is_refusal else "was acknowledged as another request"


def results_never_change(world: "World", rows: list[Row]) -> Iterator[str]:
    by_id = {row.request_id: row for row in rows}
    for request in world.history.requests:
        if not request.results or request.request_ids[0] not in by_id:
            continue
        row = by_id[request.request_ids[0]]
        for status, detail, body in request.results:
            kept = row.body if row.failure is None else row.failure[1].encode()
            if (status, body) != (row.status, kept):
                yield f"{_named(request)}: {status} {detail} was given, {row.status} is on record"


def one_row_for_each_number(rows: list[Row]) -> Iterator[str]:
    seen: dict[tuple[str, int], str] = {}
    for row in rows:
        if row.seq_id is not None and (row.owner, row.seq_id) in seen:
            yield f"{row.owner} {row.seq_id} is on record twice"
        seen[row.owner, row.seq_id] = row.request_id


def order_is_kept(rows: list[Row]) -> Iterator[str]:
    """Numbers rise, but chunks may pass chunks. What was refused as too late did not run."""
    ran: dict[str, list[Row]] = {}
    for row in rows:
        if row.request_id.startswith("sample-") or row.place is None or row.is_refusal:
            continue
        earlier = ran.setdefault(row.owner, [])
        for before in earlier:
            chunks = row.kind in CHUNKS and before.kind in CHUNKS
            if before.seq_id > row.seq_id and not chunks:
                yield f"{row.owner}: {row.seq_id} ({row.kind}) ran after {before.seq_id}"
        earlier.append(row)


def nothing_of_another_user(world: "World") -> Iterator[str]:
    yield from world.history.intrusions
    for user, seen in world.history.listed:
        for model_id in seen:
            if world.history.models.get(model_id, user) != user:
                yield f"{user} was shown {model_id} of another user"


def files_are_whole(world: "World") -> Iterator[str]:
    """Every checkpoint on record verifies, and no others lie there. What a command left that was
    killed, or that the database took no row of, goes when the server begins anew."""
    database = apsw.Connection(str(world.disk.folder / "tinkercloud.db"), vfs=sqlite.VFS_NAME)
    directories = {row[0] for row in database.execute("SELECT directory FROM checkpoints")}
    models = database.execute("SELECT model_id, user_metadata FROM models").fetchall()
    database.close()
    of_server = {model_id for model_id, about in models if "branch_of" not in json.loads(about)}
    for directory in sorted(directories):
        try:
            checkpoint_files.verify(world.disk.folder / directory)
        except ServerFault as error:
            yield f"checkpoint {directory}: {error}"
    for path in world.disk.folder.glob("checkpoints/*/*/*/*"):
        directory = path.relative_to(world.disk.folder)
        if directory.parts[1] not in of_server and world.commands.may_have_left_files:
            continue
        if str(directory) not in directories:
            yield f"{directory} belongs to nothing"


def what_was_deleted_is_gone(world: "World") -> Iterator[str]:
    """Models that were deleted, or whose session has ended, and checkpoints."""
    deleted = {model_id for model_id, is_told in world.history.deleted.items() if is_told}
    database = apsw.Connection(str(world.disk.folder / "tinkercloud.db"), vfs=sqlite.VFS_NAME)
    rows = database.execute(
        "SELECT model_id, segment, name, expires_at FROM checkpoints"
    ).fetchall()
    live = {row[0] for row in database.execute("SELECT model_id FROM models WHERE state = 'live'")}
    sampled = {row[0] for row in database.execute(_SAMPLED)}  # these are needed for their versions
    database.close()
    for model_id in sorted(deleted & set(world.engine.inner._models) - sampled):
        yield f"{model_id} was deleted, and is in the engine's memory"
    for model_id in world.history.found_deleted:
        yield f"{model_id} was deleted, and is found"
    for model_id in sorted(deleted & live):
        yield f"{model_id} was deleted, and is live on record"
    for model_id, segment, name, expires_at in rows:
        path = f"tinker://{model_id}/{segment}/{name}"
        if world.history.removed.get(path):
            yield f"{path} was deleted, and is on record"
        # By both: time goes on meanwhile, and the clock may be set back.
        if expires_at is not None and expires_at <= min(world.cleaned_up_at, world.wall()):
            yield f"{path} has expired, and is on record"


async def nothing_is_left_over(world: "World") -> AsyncIterator[str]:
    """Of what was half done; what is being put away just now is looked at once more, however slow
    the engine is at it."""
    left = _left_over(world)
    if left:
        await world.engine.answered()
        await asyncio.sleep(PUT_AWAY_S)
    for text in sorted(left & _left_over(world)):
        yield f"{text} is left, and nothing needs it"


def _left_over(world: "World") -> set[str]:
    """Half written folders, and in the engine's memory versions that nobody can sample and copies
    of models."""
    folder = world.disk.folder
    temporaries = folder.glob(f"recovery/*/{checkpoint_files.TEMPORARY_PREFIX}*")
    assert world.server is not None
    versions = world.server.services.sampling._versions._versions
    sampled = {each.version for each in versions.unused_for(0.0)}
    return {
        *(str(path.relative_to(folder)) for path in temporaries),
        *(world.engine.inner._versions.keys() - sampled),
        *(f"copy {number}" for number in world.engine.inner._copies),
    }


async def asking_again_gives_the_same(world: "World", rows: list[Row]) -> AsyncIterator[str]:
    """A client that polls and posts again gets the same id and the same result."""
    choices = random.Random(f"{world.schedule.seed} asking")
    by_id = {row.request_id: row for row in rows}
    asked = [each for each in world.history.requests if each.is_acknowledged]
    asked = [e for e in asked if e.request_ids[0] in by_id and e.seq_id is not None]
    for request in choices.sample(asked, min(len(asked), NUM_ASKED_AGAIN)):
        wire = SdkWire(world.network, world.keys[request.user], 60.0)
        row = by_id[request.request_ids[0]]
        try:
            status, _, body = await wire.result(row.request_id)
            kept = row.body if row.failure is None else row.failure[1].encode()
            if (status, body) != (row.status, kept):
                yield f"{_named(request)}: another result when asked again"
            again = await wire.post(*request.post)
        except Refused as refusal:
            if row.failure is None and not _may_be_gone(world, request):
                yield f"{_named(request)}: asked again, it is refused: {refusal}"
        else:
            if again["request_id"] != row.request_id and not row.is_refusal:
                yield f"{_named(request)}: another request when posted again"


def _may_be_gone(world: "World", request: Request) -> bool:
    """What it is for, or what it loads."""
    history = world.history
    return (
        request.owner in history.deleted
        or request.body.get("path") in history.removed
        or request.owner.partition(":")[0] in history.finished
    )


async def equals_the_undisturbed_run(world: "World", rows: list[Row]) -> AsyncIterator[str]:
    oracle = Oracle()
    lanes: dict[str, list[Row]] = {}
    for row in rows:
        if not row.request_id.startswith("sample-") and not row.is_refusal:
            lanes.setdefault(row.owner, []).append(row)
    async for text in _lanes_differ(world, oracle, lanes):
        yield text
    for text in _samples_differ(world, oracle, rows):
        yield text
    for text in chats_differ(world, oracle):
        yield text
    for text in _states_differ(world, oracle):
        yield text


async def _lanes_differ(
    world: "World", oracle: Oracle, lanes: dict[str, list[Row]]
) -> AsyncIterator[str]:
    moved = True
    while moved:
        moved = False
        for lane in lanes.values():
            while lane:
                request = world.history.find(lane[0].owner, lane[0].seq_id)
                if request is None or (oracle.is_blocked(request) and lane[0].failure is None):
                    break
                moved = True
                text = await _differs(world, oracle, request, lane.pop(0))
                if text is not None:
                    yield f"{_named(request)}: {text}"
    for owner, lane in lanes.items():
        if lane:
            yield f"{owner}: {lane[0].kind} {lane[0].seq_id} loads what was never saved"


async def _differs(world: "World", oracle: Oracle, request: Request, row: Row) -> str | None:
    if row.failure is not None and row.failure[1] == TOO_LATE_TEXT:
        return None
    if row.failure is not None and _is_named(world, row.failure[1]):
        return None
    try:
        expected = await oracle.apply(request, row.body)
    except TinkercloudError as error:
        if row.failure is None:
            return f"it completed, and must fail: {error}"
        return None if row.failure[1] == str(error) else f"failed as {row.failure}, not as {error}"
    except KeyError as error:  # its model, or the checkpoint that it loads, was never made
        if row.failure is not None and row.failure[0] == "user":
            return None
        return f"it ended as {row.failure or 'completed'} without {error}"
    if row.failure is not None:
        return f"it failed: {row.failure}"
    return difference(request, row, expected)


def _is_named(world: "World", text: str) -> bool:
    """A failure that may be; that a checkpoint is missing, only where it may have gone."""
    if text.startswith("checkpoint ") and text.endswith("does not exist"):
        paths = (path.removeprefix("tinker://") for path in world.history.removed)
        return any(path in text for path in paths)
    if world.schedule.published_bytes == LITTLE_BYTES and "published_bytes" in text:
        return True
    return _NAMED.search(text) is not None


def _samples_differ(world: "World", oracle: Oracle, rows: list[Row]) -> Iterator[str]:
    for sampler_id, weights in world.history.samplers.items():
        oracle.pin(sampler_id, weights)
    for row in rows:
        request = world.history.of_row(row.request_id, row.owner, row.seq_id)
        if request is None or request.kind != "sample":
            continue
        if row.failure is not None:
            is_finished = request.owner.partition(":")[0] in world.history.finished
            if not is_finished and not _is_named(world, row.failure[1]):
                yield f"{_named(request)}: it failed: {row.failure}"
        elif "seed" in request.body["sampling_params"] and request.owner in oracle.versions:
            texts = [difference(request, row, each) for each in oracle.samples(request)]
            if all(texts):
                yield f"{_named(request)}: {texts[0]}"


def _states_differ(world: "World", oracle: Oracle) -> Iterator[str]:
    """Of models, and of checkpoints as files."""
    for model_id, state in world.engine.inner._models.items():
        if model_id in oracle.models:
            text = state_difference(state, oracle.models[model_id])
            if text is not None:
                yield f"{model_id} has {text} at the end"
    database = apsw.Connection(str(world.disk.folder / "tinkercloud.db"), vfs=sqlite.VFS_NAME)
    rows = database.execute("SELECT model_id, segment, name, directory FROM checkpoints").fetchall()
    archives = "SELECT model_id, user_metadata FROM models WHERE state = 'archive'"
    made = {copy: json.loads(metadata) for copy, metadata in database.execute(archives)}
    database.close()
    for model_id, segment, name, directory in rows:
        path = f"tinker://{model_id}/{segment}/{name}"
        expected = _expected(oracle, path, made.get(model_id, {}))
        if expected is None:
            yield f"{path} is there, and was never saved"
            continue
        if segment != "weights":
            continue
        text = state_difference(read_state(world.disk.folder / directory), expected)
        if text is not None:
            yield f"{path} has {text}"


def _expected(oracle: Oracle, path: str, origin: dict[str, str]) -> ModelState | None:
    """origin: of a copy, or of a branch."""
    if "branch_of" in origin:
        steps = oracle.steps.get(origin["branch_of"], [])
        number = int(origin["step"])
        return steps[number - 1] if number <= len(steps) else None
    return oracle.states.get(origin.get(ORIGIN, path))


def _named(request: Request) -> str:
    return f"{request.kind} of {request.user}, {request.owner[-8:]} {request.seq_id}"
