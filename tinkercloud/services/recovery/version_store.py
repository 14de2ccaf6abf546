"""The published version of each key, and its users."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tinkercloud.backends.base import Backend
from tinkercloud.storage.metadata import Sampler


def version_key(sampler: Sampler) -> str:
    """Samplers with the same key sample the same version."""
    match sampler.kind:
        case "base":
            return f"base|{sampler.base_model}"
        case "checkpoint":
            return f"checkpoint|{sampler.base_model}|{sampler.directory}"
        case "snapshot":
            return f"snapshot|{sampler.sampler_id}"
        case "inflight":
            return f"inflight|{sampler.model_id}"


class Published(NamedTuple):
    """model: (user, model id) of what published it; None: it can be published again at any time."""

    key: str
    version: str
    model: tuple[str, str] | None


@dataclass(slots=True, eq=False)
class _Entry:
    """model: (user, model id) of published weights that are nowhere else than in the backend's
    memory. used_at: monotonic."""

    version: asyncio.Future[str]
    model: tuple[str, str] | None = None
    users: set[str] = field(default_factory=set)
    used_at: float = field(default_factory=lambda: time.monotonic())  # a simulation's clock, too

    @property
    def is_ready(self) -> bool:
        done = self.version.done() and not self.version.cancelled()
        return done and self.version.exception() is None


class VersionStore:
    """Publishes a key's version at its first use, once for all concurrent users."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self._entries: dict[str, _Entry] = {}

    async def close(self) -> None:
        """Stop publishing. The versions themselves end with the backend."""
        futures = [entry.version for entry in self._entries.values()]
        self._entries.clear()
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)

    async def put(self, key: str, version: str, model: tuple[str, str]) -> None:
        """Set a key's version, published from a model (user, model id); the one that it replaces is
        released."""
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        ready.set_result(version)
        old = self._entries.get(key)
        # Replaced before it is released: no new sample may get a released version.
        self._entries[key] = _Entry(ready, model, set() if old is None else old.users)
        if old is not None:
            await self._release(old)

    async def get(self, key: str, user: str, publish: Callable[[], Awaitable[str]]) -> str:
        """The version of `key`, published now if there is none. user: counted until `leave`."""
        entry = self._entries.get(key)
        if entry is None:
            task = asyncio.ensure_future(self._published(key, publish))
            task.set_name(f"publish {key}")
            entry = self._entries[key] = _Entry(task)
        entry.users.add(user)
        entry.used_at = time.monotonic()
        try:
            # shielded: one user who is cancelled must not cancel what others wait for
            return await asyncio.shield(entry.version)
        except Exception:  # whatever it is: the next one who asks publishes anew
            self._forget(key, entry)
            raise

    async def _published(self, key: str, publish: Callable[[], Awaitable[str]]) -> str:
        version = await publish()
        entry = self._entries.get(key)
        is_kept = entry is not None and (
            entry.version is asyncio.current_task()
            or (entry.is_ready and entry.version.result() == version)  # it was `put` meanwhile
        )
        if not is_kept:  # everybody has left
            await self._backend.release(version)
        return version

    def current(self, key: str) -> str | None:
        """A version that was `put`."""
        entry = self._entries.get(key)
        return None if entry is None or entry.model is None else entry.version.result()

    def of_model(self, model: tuple[str, str]) -> dict[str, str]:
        """Versions that were published from a model, by key."""
        entries = self._entries.items()
        return {key: e.version.result() for key, e in entries if e.model == model}

    def unused_for(self, seconds: float) -> list[Published]:
        before = time.monotonic() - seconds
        return [
            Published(key, entry.version.result(), entry.model)
            for key, entry in self._entries.items()
            if entry.is_ready and entry.used_at <= before
        ]

    def find(self, key: str) -> Published | None:
        """What samplers of the key sample; None where that must be published first."""
        entry = self._entries.get(key)
        if entry is None or not entry.is_ready:
            return None
        return Published(key, entry.version.result(), entry.model)

    async def evict(self, published: Published) -> None:
        """Release it, whoever has used it, unless it was replaced meanwhile. Samples underway end
        as they would have; the next one publishes it again."""
        entry = self._entries.get(published.key)
        if entry is not None and entry.is_ready and entry.version.result() == published.version:
            self._forget(published.key, entry)
            await self._release(entry)

    async def drop(self, key: str, version: str) -> None:
        """Forget a version that the backend has lost, unless it was replaced meanwhile."""
        entry = self._entries.get(key)
        if entry is not None and entry.version.done() and entry.version.result() == version:
            self._forget(key, entry)

    async def leave(self, key: str, user: str) -> None:
        """One user less; without users the version is released."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.users.discard(user)
        if not entry.users:
            self._forget(key, entry)
            await self._release(entry)

    def _forget(self, key: str, entry: _Entry) -> None:
        if self._entries.get(key) is entry:  # not one that replaced it meanwhile
            del self._entries[key]

    async def _release(self, entry: _Entry) -> None:
        if entry.is_ready:
            await self._backend.release(entry.version.result())
