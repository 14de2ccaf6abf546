"""Capture sessions and their turns: the exact tokens that agents sampled, for training on them."""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkercloud.storage.connections import Statement
from tinkercloud.storage.database import Database, Row

_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
_ROW_BYTES = 512  # of a turn or a sample, apart from what it holds


@dataclass(frozen=True, slots=True)
class Capture:
    """details: what is sampled and how rewards are asked for (capture_service.py). It is
    removed ttl_s after used_at."""

    capture_id: str
    user: str
    details: Mapping[str, Any]
    ttl_s: float
    created_at: float
    used_at: float
    closed_at: float | None = None
    num_turns: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SampleRef:
    """A sample of a turn. As text it also names the trajectory that ends with it."""

    turn_id: str
    index: int

    def __str__(self) -> str:
        return f"{self.turn_id}:{self.index}"


@dataclass(frozen=True, slots=True)
class CapturedSample:
    """tokens int32 (S,) with the stop token; logprobs float32 (S,) under the distribution that
    they were drawn from. digest: of the conversation with this answer."""

    index: int
    digest: str
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: str
    message: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CapturedTurn:
    """prompt int32, messages: what follows the parent's tokens and its answer; all of them where
    there is no parent. details: model, weights, params, tools."""

    turn_id: str
    capture_id: str
    user: str
    parent: SampleRef | None
    group: str | None
    episode: str | None
    digest: str
    prompt: NDArray[np.int32]
    messages: Sequence[Mapping[str, Any]]
    details: Mapping[str, Any]
    samples: tuple[CapturedSample, ...]
    created_at: float = field(default_factory=lambda: time.time())  # a simulation's clock, too

    @property
    def num_bytes(self) -> int:
        tokens = sum(8 * len(sample.tokens) for sample in self.samples)
        texts = sum(len(json.dumps(sample.message)) for sample in self.samples)
        texts += len(json.dumps(self.messages)) + len(json.dumps(self.details))
        rows = _ROW_BYTES * (1 + len(self.samples))
        return 4 * len(self.prompt) + tokens + texts + rows


@dataclass(frozen=True, slots=True)
class AnsweredConversation:
    """A sample whose conversation with its answer has this digest."""

    ref: SampleRef
    digest: str
    message: Mapping[str, Any]
    created_at: float


class CaptureStorage:
    """Reads take the user and show nothing of anybody else's."""

    def __init__(self, database: Database):
        self._database = database

    # sessions

    async def add(self, capture: Capture) -> None:
        await self._database.write(
            "INSERT INTO captures (capture_id, user, details, ttl_s, created_at, used_at)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            *(capture.capture_id, capture.user, json.dumps(capture.details), capture.ttl_s),
            *(capture.created_at, capture.used_at),
        )

    async def get(self, user: str, capture_id: str) -> Capture | None:
        row = await self._database.one(
            "SELECT * FROM captures WHERE capture_id = ? AND user = ?", capture_id, user
        )
        return None if row is None else _capture(row)

    async def page(self, user: str, limit: int, offset: int) -> list[Capture]:
        """The newest first."""
        rows = await self._database.all(
            "SELECT * FROM captures WHERE user = ? ORDER BY created_at DESC, capture_id"
            " LIMIT ? OFFSET ?",
            *(user, limit, offset),
        )
        return [_capture(row) for row in rows]

    async def set_details(self, user: str, capture_id: str, details: Mapping[str, Any]) -> None:
        await self._database.write(
            "UPDATE captures SET details = ?, used_at = ? WHERE capture_id = ? AND user = ?",
            *(json.dumps(details), time.time(), capture_id, user),
        )

    async def close(self, user: str, capture_id: str) -> None:
        """The first time counts."""
        await self._database.write(
            "UPDATE captures SET closed_at = COALESCE(closed_at, ?), used_at = ?"
            " WHERE capture_id = ? AND user = ?",
            *(time.time(), time.time(), capture_id, user),
        )

    async def delete(self, user: str, capture_id: str) -> None:
        await self._database.write(
            "DELETE FROM captures WHERE capture_id = ? AND user = ?", capture_id, user
        )

    async def expire(self) -> None:
        """Delete what was not used for its time."""
        await self._database.write("DELETE FROM captures WHERE used_at + ttl_s < ?", time.time())

    async def usage(self, user: str) -> tuple[int, int]:
        """How many sessions the user has, and the bytes of their turns."""
        row = await self._database.one(
            "SELECT COUNT(*) AS number, COALESCE(SUM(num_bytes), 0) AS bytes FROM captures"
            " WHERE user = ?",
            user,
        )
        return (0, 0) if row is None else (row["number"], row["bytes"])

    # turns

    async def add_turn(self, turn: CapturedTurn) -> None:
        """All on record when this returns, with the session's counts, or nothing of it."""
        parent_turn, parent_index = None, None
        if turn.parent is not None:
            parent_turn, parent_index = turn.parent.turn_id, turn.parent.index
        # From the session's row: a session that was deleted meanwhile gets no turn.
        insert = (
            "INSERT INTO capture_turns (turn_id, capture_id, user, parent_turn, parent_index,"
            " group_label, episode, digest, prompt, messages, details, num_bytes, created_at)"
            " SELECT ?, capture_id, user, ?, ?, ?, ?, ?, ?, ?, ?, ?, ? FROM captures"
            " WHERE capture_id = ? AND user = ?",
            (
                *(turn.turn_id, parent_turn, parent_index, turn.group, turn.episode, turn.digest),
                *(turn.prompt.astype(_INT32).tobytes(), json.dumps(turn.messages)),
                *(json.dumps(turn.details), turn.num_bytes, turn.created_at),
                *(turn.capture_id, turn.user),
            ),
        )
        count = (
            "UPDATE captures SET num_turns = num_turns + 1, num_bytes = num_bytes + ?, used_at = ?"
            " WHERE capture_id = ? AND user = ?",
            (turn.num_bytes, time.time(), turn.capture_id, turn.user),
        )
        samples = (_insert_sample(turn, sample) for sample in turn.samples)
        await self._database.write_all(*samples, insert, count)

    async def answered(
        self, capture: Capture, digests: Collection[str]
    ) -> list[AnsweredConversation]:
        """Samples with one of these digests, the newest first."""
        rows = await self._database.all(
            "SELECT s.turn_id, s.sample_index, s.digest, s.message, t.created_at"
            " FROM capture_samples s JOIN capture_turns t USING (turn_id)"
            " WHERE s.capture_id = ? AND t.user = ?"
            " AND s.digest IN (SELECT value FROM json_each(?)) ORDER BY t.created_at DESC",
            *(capture.capture_id, capture.user, json.dumps(sorted(digests))),
        )
        return [
            AnsweredConversation(
                SampleRef(row["turn_id"], row["sample_index"]),
                *(row["digest"], json.loads(row["message"]), row["created_at"]),
            )
            for row in rows
        ]

    async def has(self, capture: Capture, ref: SampleRef) -> bool:
        row = await self._database.one(
            "SELECT 1 FROM capture_samples JOIN capture_turns USING (turn_id)"
            " WHERE turn_id = ? AND sample_index = ? AND capture_turns.capture_id = ? AND user = ?",
            *(ref.turn_id, ref.index, capture.capture_id, capture.user),
        )
        return row is not None

    async def tokens_to(self, capture: Capture, ref: SampleRef) -> list[NDArray[np.int32]]:
        """Prompt and sampled tokens, alternating, of the turns up to and with this sample."""
        rows = await self._database.all(
            "WITH RECURSIVE path (turn_id, sample_index, depth) AS (SELECT ?, ?, 0 UNION ALL"
            " SELECT t.parent_turn, t.parent_index, depth + 1 FROM path JOIN capture_turns t"
            " USING (turn_id) WHERE t.parent_turn IS NOT NULL)"
            " SELECT t.prompt, s.tokens FROM path JOIN capture_turns t USING (turn_id)"
            " JOIN capture_samples s USING (turn_id, sample_index)"
            " WHERE t.capture_id = ? AND t.user = ? ORDER BY depth DESC",
            *(ref.turn_id, ref.index, capture.capture_id, capture.user),
        )
        return [np.frombuffer(row[name], _INT32) for row in rows for name in ("prompt", "tokens")]

    async def turns(self, capture: Capture) -> list[CapturedTurn]:
        """All of a session's, the oldest first."""
        rows = await self._database.all(
            "SELECT * FROM capture_turns WHERE capture_id = ? AND user = ?"
            " ORDER BY created_at, turn_id",
            *(capture.capture_id, capture.user),
        )
        samples: dict[str, list[CapturedSample]] = {row["turn_id"]: [] for row in rows}
        for row in await self._database.all(
            "SELECT * FROM capture_samples WHERE capture_id = ? ORDER BY sample_index",
            capture.capture_id,
        ):
            if row["turn_id"] in samples:
                samples[row["turn_id"]].append(_sample(row))
        return [_turn(row, samples[row["turn_id"]]) for row in rows]


def _insert_sample(turn: CapturedTurn, sample: CapturedSample) -> Statement:
    return (
        "INSERT INTO capture_samples SELECT ?, ?, capture_id, ?, ?, ?, ?, ? FROM captures"
        " WHERE capture_id = ? AND user = ?",
        (
            *(turn.turn_id, sample.index, sample.digest, sample.tokens.astype(_INT32).tobytes()),
            *(sample.logprobs.astype(_FLOAT32).tobytes(), sample.finish_reason),
            *(json.dumps(sample.message), turn.capture_id, turn.user),
        ),
    )


def _capture(row: Row) -> Capture:
    fields = dict(row)
    fields["details"] = json.loads(row["details"])
    return Capture(**fields)


def _sample(row: Row) -> CapturedSample:
    return CapturedSample(
        *(row["sample_index"], row["digest"]),
        *(np.frombuffer(row["tokens"], _INT32), np.frombuffer(row["logprobs"], _FLOAT32)),
        *(row["finish_reason"], json.loads(row["message"])),
    )


def _turn(row: Row, samples: Sequence[CapturedSample]) -> CapturedTurn:
    parent = None
    if row["parent_turn"] is not None:
        parent = SampleRef(row["parent_turn"], row["parent_index"])
    return CapturedTurn(
        *(row["turn_id"], row["capture_id"], row["user"], parent, row["group_label"]),
        *(row["episode"], row["digest"], np.frombuffer(row["prompt"], _INT32)),
        *(json.loads(row["messages"]), json.loads(row["details"]), tuple(samples)),
        created_at=row["created_at"],
    )
