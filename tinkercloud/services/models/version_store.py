"""The published version of each key, and its users."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tinkercloud.backends.base import Backend


@dataclass(slots=True, eq=False)
class _Entry:
    """model_id: of published weights that are nowhere else than in the backend's memory."""

    version: asyncio.Future[str]
    model_id: str | None = None
    users: set[str] = field(default_factory=set)


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

    async def put(self, key: str, version: str, model_id: str) -> None:
        """Set a key's version, published from a model; the one that it replaces is released."""
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        ready.set_result(version)
        old = self._entries.get(key)
        # Replaced before it is released: no new sample may get a released version.
        self._entries[key] = _Entry(ready, model_id, set() if old is None else old.users)
        if old is not None:
            await self._release(old)

    async def get(self, key: str, user: str, publish: Callable[[], Awaitable[str]]) -> str:
        """The version of `key`, published now if there is none. user: counted until `leave`."""
        entry = self._entries.get(key)
        if entry is None:
            task = asyncio.ensure_future(publish())
            task.set_name(f"publish {key}")
            entry = self._entries[key] = _Entry(task)
        entry.users.add(user)
        try:
            # shielded: one user who is cancelled must not cancel what others wait for
            return await asyncio.shield(entry.version)
        except Exception:
            self._forget(key, entry)
            raise

    def current(self, key: str) -> str | None:
        """A version that was `put`."""
        entry = self._entries.get(key)
        return None if entry is None or entry.model_id is None else entry.version.result()

    def of_model(self, model_id: str) -> dict[str, str]:
        """Versions that were published from a model, by key."""
        entries = self._entries.items()
        return {key: e.version.result() for key, e in entries if e.model_id == model_id}

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
        if entry.version.done() and entry.version.exception() is None:
            await self._backend.release(entry.version.result())
