"""What a key may have and use at a time, and when a request with it has to wait.

Two limits are of what passes by itself: operations underway, and tokens a minute. Whoever is over
one of them is told to come again (`TooManyRequests`); clients do so (wire specification, section
5). The others are of what stays until somebody removes it (`QuotaExceeded`).
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from tinkercloud.errors import QuotaExceeded, TooManyRequests
from tinkercloud.services.accounts.usage_recorder import UsageRecorder
from tinkercloud.storage.futures import Ticket
from tinkercloud.storage.keys import UNLIMITED, KeyRecord
from tinkercloud.storage.metadata import MetadataStorage, Model

MINUTE_S = 60.0
LONGEST_RETRY_S = 60  # clients wait no longer than that when told to (wire specification, 1)
_NOBODY = KeyRecord("", "", b"", quota=UNLIMITED)
_key: ContextVar[KeyRecord] = ContextVar("the key that this request came with", default=_NOBODY)


@contextmanager
def with_key(key: KeyRecord) -> Generator[None]:
    """Around a request: its quotas are those of the key. What no request asks for has none."""
    token = _key.set(key)
    try:
        yield
    finally:
        _key.reset(token)


@dataclass(slots=True)
class _Bucket:
    """Of tokens (a token bucket: RFC 2697 has such meters). Below 0 is what was used beyond it."""

    level: float
    total: int
    at_s: float


class Quotas:
    """What counts is what the key's user has and uses, by whichever key."""

    def __init__(
        self,
        metadata: MetadataStorage,
        usage: UsageRecorder,
        clock_s: Callable[[], float] = time.monotonic,
    ):
        self._metadata = metadata
        self._usage = usage
        self._clock_s = clock_s
        self._underway: Counter[str] = Counter()
        self._reserved: Counter[str] = Counter()
        self._buckets: dict[str, _Bucket] = {}

    # operations and tokens

    def require(self, user: str) -> None:
        """Whether one more request may begin now. Raises TooManyRequests."""
        quota = _key.get().quota
        underway = self._underway[user]
        if quota.queued is not None and underway >= quota.queued:
            raise TooManyRequests(
                f"{underway} operations are underway and this key's quota is {quota.queued} at a "
                "time; send it again when some have ended"
            )
        if quota.tokens_per_minute is not None:
            self._require_tokens(user, quota.tokens_per_minute)

    def _require_tokens(self, user: str, per_minute: int) -> None:
        level = self._level(user, per_minute)
        if level > 0:
            return
        wait_s = LONGEST_RETRY_S if per_minute == 0 else (1 - level) * MINUTE_S / per_minute
        raise TooManyRequests(
            f"this key's quota of {per_minute:,} tokens a minute is used up for the next "
            f"{math.ceil(wait_s):,} s; send it again then",
            retry_after_s=min(math.ceil(wait_s), LONGEST_RETRY_S),
        )

    def _level(self, user: str, per_minute: int) -> float:
        """How many tokens are left: a minute's at most. What is used beyond them counts on."""
        now_s, total = self._clock_s(), self._usage.num_tokens(user) + self._reserved[user]
        key_id = _key.get().key_id
        bucket = self._buckets.setdefault(key_id, _Bucket(per_minute, total, now_s))
        gained = per_minute * (now_s - bucket.at_s) / MINUTE_S
        level = min(bucket.level - (total - bucket.total) + gained, per_minute)
        self._buckets[key_id] = _Bucket(level, total, now_s)
        return level

    def enter(self, ticket: Ticket) -> None:
        """An operation is underway until it leaves; the tokens that it may take are taken."""
        self._underway[ticket.user] += 1
        self._reserved[ticket.user] += ticket.num_tokens

    def leave(self, ticket: Ticket) -> None:
        """It has ended, and the usage recorder has counted its tokens."""
        self._underway[ticket.user] -= 1
        self._reserved[ticket.user] -= ticket.num_tokens

    @contextmanager
    def underway(self, user: str) -> Generator[None]:
        """The same of what is on no record: an answer that streams."""
        self._underway[user] += 1
        try:
            yield
        finally:
            self._underway[user] -= 1

    # what stays

    async def require_model(self, model: Model, bytes_of: Callable[[Model], int]) -> None:
        """Room for one more model. bytes_of: the memory that training of a model needs. Raises
        QuotaExceeded."""
        quota = _key.get().quota
        if quota.models is None and quota.memory_bytes is None:
            return
        live = await self._metadata.live_models(model.user)
        if any(other.model_id == model.model_id for other in live):
            return  # a repeated request
        if quota.models is not None and len(live) >= quota.models:
            raise QuotaExceeded(
                f"{len(live)} models are live and this key's quota is {quota.models}; finish a "
                "session or delete a model (delete_model) to make room"
            )
        if quota.memory_bytes is None:
            return
        held, needed = sum(map(bytes_of, live)), bytes_of(model)
        if held + needed > quota.memory_bytes:
            raise QuotaExceeded(
                f"training this model needs {needed:,} bytes beside the {held:,} of the "
                f"{len(live)} live ones, and this key's quota of memory is "
                f"{quota.memory_bytes:,}; take a lower rank, finish a session, or delete a model"
            )

    def checkpoint_bytes(self) -> int | None:
        """How many all checkpoints of the user may have; None: no limit."""
        return _key.get().quota.checkpoint_bytes
