"""Drafters of the proxy: servers that sample, and how several of them draft together."""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from tinkercloud.chat.requests import SamplingOptions
from tinkercloud.errors import TinkercloudError
from tinkercloud.proxy.server_kinds import ServerKind
from tinkercloud.proxy.upstream import Upstream
from tinkercloud.proxy.verification import RoundRequest
from tinkercloud.speculative.drafters.drafter import NO_DRAFT, Draft

logger = logging.getLogger(__name__)

RETRY_S = 5.0
GREEDY = SamplingOptions(temperature=0.0)
Together = Literal["race", "consensus"]


class DraftSession(Protocol):
    """Drafts of one sample."""

    async def draft(self, request: RoundRequest) -> Draft:
        """Of request.num_tokens at most, that may come after its prompt. Raises
        TinkercloudError."""
        ...

    def close(self) -> None: ...


class DraftSource(Protocol):
    name: str

    def open(self) -> DraftSession: ...


class TokenDrafter:
    """A server with the target's vocabulary."""

    def __init__(self, upstream: Upstream, kind: ServerKind):
        self.name = upstream.name
        self._upstream = upstream
        self._form = kind.sample
        self._is_seeded = kind.is_seeded

    def open(self) -> DraftSession:
        return self

    async def draft(self, request: RoundRequest) -> Draft:
        if not self._is_seeded:  # its noise is not the target's, and the likeliest is right oftener
            request = replace(request, sampling=GREEDY)
        answer = await self._upstream.post(self._form.path, self._form.request(request))
        return Draft(self._form.read(request, answer).tokens)

    def close(self) -> None:
        """A server keeps nothing of a sample but what it caches."""


@dataclass(slots=True)
class DraftEntry:
    """A drafter, and how it does. num_asked: rounds that wanted its draft; num_taken: those whose
    draft it gave. down_until: of the monotonic clock; 0: it is up. trouble: why it is not."""

    source: DraftSource
    down_until: float = 0.0
    trouble: str = ""
    num_asked: int = 0
    num_taken: int = 0
    num_failed: int = 0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self.down_until

    def failed(self, reason: str) -> None:
        self.num_failed += 1
        if not self.down_until:
            logger.warning("no drafts from %s: %s", self.source.name, reason)
        self.down_until = time.monotonic() + RETRY_S
        self.trouble = reason

    def answered(self) -> None:
        if self.down_until:
            logger.warning("drafts from %s again", self.source.name)
        self.down_until = 0.0
        self.trouble = ""


@dataclass(slots=True)
class DraftPool:
    """together: race: the first draft is taken; consensus: what more than half of the drafters that
    answer agree on. timeout_s: after which a drafter has failed. One that failed is left out for
    RETRY_S."""

    sources: Sequence[DraftSource]
    together: Together
    timeout_s: float
    entries: list[DraftEntry] = field(init=False)

    def __post_init__(self) -> None:
        self.entries = [DraftEntry(source) for source in self.sources]

    def open(self) -> "DraftSessions":
        return DraftSessions(self)


class DraftSessions:
    """Of one sample, one of each drafter."""

    def __init__(self, pool: DraftPool):
        self._pool = pool
        self._stack = ExitStack()
        self._sessions = [(entry, entry.source.open()) for entry in pool.entries]
        for _, session in self._sessions:
            self._stack.callback(session.close)

    def close(self) -> None:
        self._stack.close()

    async def draft(self, request: RoundRequest) -> Draft:
        """Empty where there is none: every drafter is down, or has nothing to say."""
        tasks: _Tasks = {
            asyncio.ensure_future(self._ask(entry, session, request)): entry
            for entry, session in self._sessions
            if entry.is_due
        }
        try:
            if self._pool.together == "race":
                return await _first(tasks)
            return await _agreed(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, entry: DraftEntry, session: DraftSession, request: RoundRequest) -> Draft:
        entry.num_asked += 1
        try:
            async with asyncio.timeout(self._pool.timeout_s):
                draft = await session.draft(request)
        except TimeoutError:
            entry.failed(f"no answer within {self._pool.timeout_s:g} s")
            return NO_DRAFT
        except TinkercloudError as error:
            entry.failed(str(error))
            return NO_DRAFT
        entry.answered()
        return beginning(draft, request.num_tokens)


def beginning(draft: Draft, num_tokens: int) -> Draft:
    return Draft(draft.tokens[:num_tokens], draft.confidences[:num_tokens])


_Tasks = dict[asyncio.Future[Draft], DraftEntry]


async def _first(tasks: _Tasks) -> Draft:
    waiting = set(tasks)
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            draft = task.result()
            if draft.tokens:
                tasks[task].num_taken += 1
                return draft
    return NO_DRAFT


async def _agreed(tasks: _Tasks) -> Draft:
    drafts = [draft.tokens for draft in await asyncio.gather(*tasks)]
    tokens = agreed([each for each in drafts if each])
    for entry, each in zip(tasks.values(), drafts, strict=True):
        entry.num_taken += bool(tokens) and each[: len(tokens)] == tokens
    return Draft(tokens)


def agreed(drafts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The longest beginning that more than half of the drafts have."""
    tokens: list[int] = []
    voters = list(drafts)
    while True:
        votes = [draft[len(tokens)] for draft in voters if len(draft) > len(tokens)]
        token = max(votes, key=votes.count, default=None)
        if token is None or 2 * votes.count(token) <= len(drafts):
            return tuple(tokens)
        tokens.append(token)
        voters = [draft for draft in voters if draft[: len(tokens)] == tuple(tokens)]
