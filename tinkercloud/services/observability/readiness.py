"""Whether this server can do its work just now: the engine answers, and the storage takes writes.

Anybody may ask without a key, so an answer is remembered for `REMEMBERED_S` and shared by all who
ask meanwhile, and each check has a deadline.
"""

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tinkercloud.backends.base import Backend
from tinkercloud.errors import TinkercloudError
from tinkercloud.storage.database import Database

logger = logging.getLogger(__name__)

REMEMBERED_S = 1.0
DEADLINE_S = 3.0
_PROBE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Readiness:
    """reasons: by what is checked ("storage", "engine", "placement"), why it keeps this server from
    its work; None: it does not."""

    reasons: Mapping[str, str | None]

    @property
    def is_ready(self) -> bool:
        return all(reason is None for reason in self.reasons.values())


class ReadinessService:
    def __init__(self, backend: Backend, database: Database, data_dir: Path):
        self._backend = backend
        self._database = database
        self._data_dir = data_dir
        self._checked_at = float("-inf")
        self._check: asyncio.Task[Readiness] | None = None

    async def check(self) -> Readiness:
        is_old = time.monotonic() - self._checked_at > REMEMBERED_S
        if self._check is None or (self._check.done() and is_old):
            self._checked_at = time.monotonic()
            self._check = asyncio.create_task(self._checked(), name="readiness")
        # shielded: others wait for the same check
        return await asyncio.shield(self._check)

    async def _checked(self) -> Readiness:
        storage, backend = await asyncio.gather(
            _within(DEADLINE_S, self._storage(), "storage"),
            _within(DEADLINE_S, self._backend.readiness(), "engine"),
        )
        self._checked_at = time.monotonic()
        return Readiness({**storage, **backend})

    async def _storage(self) -> Mapping[str, str | None]:
        try:
            await self._database.probe()
            await asyncio.to_thread(_write_file, self._data_dir)
        except (TinkercloudError, OSError) as error:
            text = error.strerror if isinstance(error, OSError) else str(error)
            return {"storage": f"the data folder cannot be written: {text}"}
        return {"storage": None}


async def _within(
    deadline_s: float, check: Awaitable[Mapping[str, str | None]], name: str
) -> Mapping[str, str | None]:
    try:
        async with asyncio.timeout(deadline_s):
            return await check
    except TimeoutError:
        return {name: f"no answer within {deadline_s:g} s"}
    except Exception as error:  # our defect; a load balancer still learns which check it was
        logger.exception("the check of readiness %r failed", name)
        return {name: f"the check failed ({type(error).__name__}); see the server's log"}


def _write_file(folder: Path) -> None:
    """As large as a page of anything else: a full disk often takes a few bytes more."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())
