"""What must hold of chats and capture sessions at rest. Each function finds what is wrong, in
words."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import apsw

from tests.simulation import sqlite
from tests.simulation.history import Captured, Chat
from tests.simulation.oracle import Oracle
from tinkercloud.services.captures.capture_results import TrajectoryQuery

if TYPE_CHECKING:
    from tests.simulation.world import World

TABLES = ("turns", "samples", "rewards", "closings", "deliveries")


def captures_are_whole(world: "World") -> Iterator[str]:
    """What agents were told is on record, what was deleted is not, and counts are right."""
    database = apsw.Connection(str(world.disk.folder / "tinkercloud.db"), vfs=sqlite.VFS_NAME)
    try:
        for captured in world.history.captures:
            yield from _kept_wrongly(database, captured)
        yield from _counted_wrongly(database)
        yield from _belongs_to_nothing(database)
    finally:
        database.close()


def _kept_wrongly(database: apsw.Connection, captured: Captured) -> Iterator[str]:
    name = captured.capture_id
    rows = database.execute("SELECT user FROM captures WHERE capture_id = ?", (name,)).fetchall()
    if captured.is_gone and rows:
        yield f"{name} was deleted, and is on record"
    if captured.may_be_gone:
        return
    if rows != [(captured.user,)]:
        yield f"{name} of {captured.user} is on record as {rows}"
    turns = dict(
        database.execute(
            "SELECT turn_id, message FROM capture_turns JOIN capture_samples USING (turn_id)"
            " WHERE capture_turns.capture_id = ? AND sample_index = 0",
            (name,),
        ).fetchall()
    )
    for turn_id, text in captured.answers:
        if turn_id not in turns:
            yield f"turn {turn_id} of {name} was answered, and is not on record"
        elif (json.loads(turns[turn_id])["content"] or "") != text:
            yield f"turn {turn_id} of {name} was answered {text!r}, not {turns[turn_id]}"
    rewards = {
        (target, key): value
        for target, key, value in database.execute(
            "SELECT target, key, value FROM capture_rewards WHERE capture_id = ?", (name,)
        )
    }
    for place, value in captured.rewards.items():
        if rewards.get(place) != value:
            yield f"a reward {place} of {name} is {rewards.get(place)}, not {value}"


def _counted_wrongly(database: apsw.Connection) -> Iterator[str]:
    rows = database.execute(
        "SELECT capture_id, num_turns, captures.num_bytes, COUNT(turn_id),"
        " COALESCE(SUM(capture_turns.num_bytes), 0)"
        " FROM captures LEFT JOIN capture_turns USING (capture_id) GROUP BY capture_id"
    )
    for name, num_turns, num_bytes, there, bytes_there in rows:
        if (num_turns, num_bytes) != (there, bytes_there):
            counted = f"{num_turns} turns of {num_bytes} bytes"
            yield f"{name} says {counted}, and has {there} of {bytes_there}"


def _belongs_to_nothing(database: apsw.Connection) -> Iterator[str]:
    for table in TABLES:
        query = (
            f"SELECT COUNT(*) FROM capture_{table} WHERE capture_id NOT IN"
            " (SELECT capture_id FROM captures)"
        )
        num_left = database.execute(query).fetchone()[0]
        if num_left:
            yield f"{num_left} {table} are of no capture session"
    without_turn = database.execute(
        "SELECT COUNT(*) FROM capture_samples WHERE turn_id NOT IN"
        " (SELECT turn_id FROM capture_turns)"
    ).fetchone()[0]
    if without_turn:
        yield f"{without_turn} captured samples are of no turn"


async def captures_can_be_read(world: "World") -> None:
    """Raises what reading raises."""
    assert world.server is not None
    for captured in world.history.captures:
        if not captured.may_be_gone:
            results = world.server.services.captures.results
            await results.trajectories(captured.user, captured.capture_id, TrajectoryQuery())


def chats_differ(world: "World", oracle: Oracle) -> Iterator[str]:
    """From what the weights that they named give."""
    for chat in world.history.chats:
        if chat.sampler_id in oracle.versions:
            texts = oracle.texts(chat)
            if chat.text not in texts:
                yield f"{_named(chat)} was answered {chat.text!r}, not {' or '.join(texts)!r}"


def _named(chat: Chat) -> str:
    return f"{chat.letters!r} to {chat.sampler_id[-8:]} of {chat.user}"
