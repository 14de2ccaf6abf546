"""What clients did and saw, for the invariants: the truth that no server can change."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tinkercloud.core.types import RecordedSequence

Result = tuple[str, str, bytes]
"""(status, content type, body); a failure is ("failed", category, text)."""


NUMBERS_OF_A_TRY = 1_000  # of samplers, between two tries of one save


@dataclass(eq=False, slots=True)
class Request:
    """One numbered request, or a sample without a number. body: what it asks for, as the oracle
    reads it. request_ids: as the server acknowledged it, in every answer. results: every one that
    was read. records: of the sampled sequences that it names. custom_loss: as JSON."""

    user: str
    kind: str
    owner: str  # a model or a sampler
    seq_id: int | None
    body: dict[str, Any] = field(repr=False)
    post: tuple[str, bytes, str] = ("", b"", "")  # path, content, its type
    request_ids: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list, repr=False)
    refusal: str | None = None  # why it was given up at its POST
    lost: str | None = None  # an answer to a poll that none may be
    records: Mapping[str, RecordedSequence] = field(default_factory=dict, repr=False)
    custom_loss: str | None = None

    @property
    def is_acknowledged(self) -> bool:
        return bool(self.request_ids)

    @property
    def sampler_id(self) -> str:
        """Of a save that makes one: what its answer says, where one was read."""
        completed = (body for status, _, body in self.results if status == "completed")
        return self.sampler_id_in(next(completed, b"{}"))

    def sampler_id_in(self, result: bytes) -> str:
        """That of one of the tries, which count on; else that of the first."""
        first = self.body["sampling_session_seq_id"]
        answered = json.loads(result).get("sampling_session_id", "")
        session, number = self.owner.partition(":")[0], answered.rpartition(":")[2]
        is_one = number.isdecimal() and int(number) % NUMBERS_OF_A_TRY == first
        return f"{session}:sample:{number if is_one else first}"


@dataclass(frozen=True, slots=True)
class Chat:
    """A message of these letters to a sampler, with a seed, and the whole text that came back."""

    user: str
    sampler_id: str
    letters: str
    seed: int
    text: str


@dataclass(eq=False, slots=True)
class Captured:
    """A capture session. answers: (turn, text of its first sample) that an agent has. rewards: of
    (target, key), acknowledged. may_be_gone: its deletion was asked for; is_gone: acknowledged."""

    capture_id: str
    user: str
    answers: list[tuple[str, str]] = field(default_factory=list)
    rewards: dict[tuple[str, str], float] = field(default_factory=dict)
    may_be_gone: bool = False
    is_gone: bool = False


@dataclass(eq=False, slots=True)
class History:
    requests: list[Request] = field(default_factory=list)
    listed: list[tuple[str, set[str]]] = field(default_factory=list)  # (user, models seen)
    intrusions: list[str] = field(default_factory=list)  # that were answered
    models: dict[str, str] = field(default_factory=dict)  # model_id -> user
    finished: set[str] = field(default_factory=set)  # sessions that may have ended
    deleted: dict[str, bool] = field(default_factory=dict)
    """Models that may be gone, and whether their clients were told that they are."""
    found_deleted: list[str] = field(default_factory=list)  # that still answered
    removed: dict[str, bool] = field(default_factory=dict)
    """Paths of checkpoints that may go, and whether their clients were told that they did."""
    samplers: dict[str, dict[str, Any]] = field(default_factory=dict)  # those of a path or a base
    chats: list[Chat] = field(default_factory=list)
    captures: list[Captured] = field(default_factory=list)
    shared: dict[str, str] = field(default_factory=dict)
    """Paths of checkpoints that were published, perhaps for a while: whose they are."""
    by_name: set[str] = field(default_factory=set)
    """Paths of checkpoints that are loaded by their names, and that no script deletes: a copy may
    have the same name."""
    wrong: list[str] = field(default_factory=list)  # in answers, whatever ended

    def samples(self) -> list[tuple[str, int]]:
        """(sampler, number) of those that clients have, several times of inflight samplers, which
        are few."""
        few = {each.sampler_id for each in self.requests if each.kind == "inflight"}
        completed = [each for each in self.requests if each.kind == "sample" and each.results]
        return [
            (each.owner, each.seq_id)
            for each in completed
            for _ in range(4 if each.owner in few else 1)
            if each.results[0][0] == "completed" and each.seq_id is not None
        ]

    def find(self, owner: str, seq_id: int | None) -> Request | None:
        if seq_id is None:
            return None
        for request in self.requests:
            if request.owner == owner and request.seq_id == seq_id:
                return request
        return None

    def of_row(self, request_id: str, owner: str, seq_id: int | None) -> Request | None:
        """As it is on record."""
        if seq_id is not None:
            return self.find(owner, seq_id)
        return next((each for each in self.requests if request_id in each.request_ids), None)
