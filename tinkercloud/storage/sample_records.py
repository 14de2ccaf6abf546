"""Samples kept for training on them: prompts, sampled tokens, and the log-probabilities under the
distributions that they were drawn from (record_stability_info)."""

import asyncio
import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from tinkercloud.core.types import RecordedSequence, SampleOutput, SampleRequest
from tinkercloud.storage.database import Database

_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class SampleOwner:
    """Who sampled: session_id may train on it; sampler_id names the weights."""

    user: str
    session_id: str
    sampler_id: str


@dataclass(frozen=True, slots=True)
class SampleOnRecord:
    session_id: str
    num_bytes: int


def sequence_id(request_id: str, index: int) -> str:
    """Of a request's sequence, as the acknowledgement names it."""
    return f"{request_id}:{index}"


def request_of(sequence: str) -> str:
    """The id of the request that a sequence id belongs to."""
    return sequence.rpartition(":")[0]


def num_bytes(request: SampleRequest, output: SampleOutput) -> int:
    """What the record of a sample takes, apart from indices."""
    num_tokens = sum(len(sequence.tokens) for sequence in output.sequences)
    return 4 * len(request.prompt) + 8 * num_tokens


class SampleRecordStorage:
    """Reads take the user and show nothing of anybody else's."""

    def __init__(self, database: Database):
        self._database = database

    async def add(
        self, request_id: str, owner: SampleOwner, request: SampleRequest, output: SampleOutput
    ) -> None:
        """All on record when this returns; the same request again changes nothing."""
        params, now = request.params, time.time()
        sample = self._database.write(
            "INSERT OR IGNORE INTO recorded_samples (request_id, user, session_id, sampler_id,"
            " temperature, top_k, top_p, prompt, num_bytes, created_at, used_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *(request_id, owner.user, owner.session_id, owner.sampler_id),
            *(params.temperature, params.top_k, params.top_p),
            *(request.prompt.astype(_INT32).tobytes(), num_bytes(request, output), now, now),
        )
        sequences = (
            self._database.write(
                "INSERT OR IGNORE INTO recorded_sequences VALUES (?, ?, ?, ?)",
                *(sequence_id(request_id, index), request_id),
                *(s.tokens.astype(_INT32).tobytes(), s.logprobs.astype(_FLOAT32).tobytes()),
            )
            for index, s in enumerate(output.sequences)
        )
        await asyncio.gather(sample, *sequences)

    async def samples(self, user: str, request_ids: Collection[str]) -> dict[str, SampleOnRecord]:
        """Those of the user that are on record, by request id."""
        rows = await self._database.all(
            "SELECT request_id, session_id, num_bytes FROM recorded_samples"
            " WHERE user = ? AND request_id IN (SELECT value FROM json_each(?))",
            *(user, json.dumps(sorted(request_ids))),
        )
        return {r["request_id"]: SampleOnRecord(r["session_id"], r["num_bytes"]) for r in rows}

    async def sequences(
        self, user: str, session_id: str, sequence_ids: Collection[str]
    ) -> Mapping[str, RecordedSequence]:
        """Those that were sampled in the session, by sequence id."""
        requests = json.dumps(sorted({request_of(sequence) for sequence in sequence_ids}))
        prompts = {
            row["request_id"]: np.frombuffer(row["prompt"], _INT32)
            for row in await self._database.all(
                "SELECT request_id, prompt FROM recorded_samples WHERE user = ? AND session_id = ?"
                " AND request_id IN (SELECT value FROM json_each(?))",
                *(user, session_id, requests),
            )
        }
        rows = await self._database.all(
            "SELECT * FROM recorded_sequences"
            " WHERE sequence_id IN (SELECT value FROM json_each(?))",
            json.dumps(sorted(sequence_ids)),
        )
        return {
            row["sequence_id"]: RecordedSequence(
                prompts[row["request_id"]],
                np.frombuffer(row["tokens"], _INT32),
                np.frombuffer(row["logprobs"], _FLOAT32),
            )
            for row in rows
            if row["request_id"] in prompts
        }

    async def renew(self, user: str, request_ids: Collection[str]) -> None:
        await self._database.write(
            "UPDATE recorded_samples SET used_at = ?"
            " WHERE user = ? AND request_id IN (SELECT value FROM json_each(?))",
            *(time.time(), user, json.dumps(sorted(request_ids))),
        )

    async def total_bytes(self, user: str) -> int:
        row = await self._database.one(
            "SELECT COALESCE(SUM(num_bytes), 0) AS total FROM recorded_samples WHERE user = ?", user
        )
        return 0 if row is None else row["total"]

    async def shrink(self, user: str, max_bytes: int) -> None:
        """Delete the user's samples that were unused longest until the others fit."""
        await self._database.write(
            "DELETE FROM recorded_samples WHERE request_id IN (SELECT request_id FROM ("
            "SELECT request_id, SUM(num_bytes) OVER (ORDER BY used_at DESC, request_id) AS total"
            " FROM recorded_samples WHERE user = ?) WHERE total > ?)",
            *(user, max_bytes),
        )

    async def delete_session(self, user: str, session_id: str) -> None:
        await self._database.write(
            "DELETE FROM recorded_samples WHERE user = ? AND session_id = ?", user, session_id
        )

    async def expire(self, ttl_s: float) -> None:
        """Delete what was not used for ttl_s."""
        await self._database.write(
            "DELETE FROM recorded_samples WHERE used_at < ?", time.time() - ttl_s
        )
