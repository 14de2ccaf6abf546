"""The sampling side of a pool: engines that start at first need, their weights and adapters.

Engines keep as many adapters as `slots` allows; the least recently used are unloaded, and loaded
from disk again when they are sampled. A released version's files are removed once no engine can ask
for them any more, not even one that is being restarted.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tinkercloud.cluster.gpus.memory import WEIGHTS
from tinkercloud.cluster.gpus.placement import Slot
from tinkercloud.cluster.gpus.ray_link import RayLink
from tinkercloud.cluster.pool.live_weights import LiveWeights
from tinkercloud.cluster.pool.versions import Version, remove
from tinkercloud.cluster.rollout.manager import BASE, RolloutManager, RolloutSettings
from tinkercloud.cluster.rollout.token_streams import TokenStreams
from tinkercloud.cluster.rollout.weight_sync import load_weights
from tinkercloud.core.types import SampleOutput, SampleRequest
from tinkercloud.errors import EngineDied, VersionLost

logger = logging.getLogger(__name__)

Places = Sequence[Sequence[Slot]]


class EngineGroup:
    """A RolloutSide. places: per engine the slots of its GPUs, called at each start, since nodes
    may be lost. live: weights that the trainer still holds. slots: adapters that engines keep."""

    def __init__(
        self,
        settings: RolloutSettings,
        places: Callable[[], Awaitable[Places]],
        live: LiveWeights,
        link: RayLink,
        *,
        slots: int,
    ):
        self._settings = settings
        self._places = places
        self._live = live
        self._link = link
        self._num_updates = {"disk": 0, "tensor": 0, "broadcast": 0}
        self._manager: RolloutManager | None = None
        self._adapters = AdapterCache(slots)
        self._folders: dict[str, Path] = {BASE: settings.model_path}
        self._retired: set[str] = set()  # names of full weights that were released
        self._weights_lost = False
        self._num_starts = 0

    @property
    def alive(self) -> bool:
        return self._manager is not None

    def stats(self) -> dict[str, float | int | str]:
        stats: dict[str, float | int | str] = {
            "engine_starts": self._num_starts,
            "adapters_loaded": len(self._adapters),
            **{f"weights_by_{how}": count for how, count in self._num_updates.items()},
        }
        return stats if self._manager is None else {**self._manager.stats(), **stats}

    # ---- memory

    async def onload(self, tags: Sequence[str]) -> int:
        if self._manager is not None:
            return await self._manager.onload(tags)
        manager = RolloutManager(self._settings, await self._places(), self._folder_of, self._link)
        self._num_starts += 1
        await manager.start()
        self._manager, self._weights_lost = manager, False
        return 0

    async def offload(self, tags: Sequence[str]) -> int:
        freed = await self._up().offload(tags)
        arguments = self._settings.arguments
        # Without a copy on the host, resuming restores the memory of weights, not their content
        # (SGLang's --enable-weights-cpu-backup).
        has_backup = not arguments.enable_memory_saver or arguments.enable_weights_cpu_backup
        if WEIGHTS in tags and not has_backup:
            self._weights_lost = True
        return freed

    async def update_weights(self, weights: str) -> int:
        manager = self._up()
        if weights == manager.weight_version() and not self._weights_lost:
            return 0
        folder = await self._folder_of(weights)
        async with self._live.holding(weights) as model_id:
            if model_id is None:
                how = "disk"
                await load_weights(manager, weights, folder)
                num_bytes = await asyncio.to_thread(_weight_bytes, folder)
            else:
                how = str(self._live.how)
                num_bytes = (await self._live.send(manager, weights, model_id)).num_bytes
        self._num_updates[how] += 1
        self._weights_lost = False
        await self._remove_retired()
        return num_bytes

    async def discard(self) -> None:
        manager, self._manager = self._manager, None
        self._adapters.clear()
        if manager is not None:
            await manager.stop()
        await self._remove_retired()

    # ---- sampling

    async def sample(
        self, version: Version, request: SampleRequest, streams: TokenStreams | None = None
    ) -> SampleOutput:
        """The engines must hold `version.weights`: call it in that sampling phase."""
        manager = self._up()
        if version.adapter is None:
            return await manager.generate(None, request, version.weights, streams)
        async with self._adapters.use(manager, version):
            return await manager.generate(version.adapter, request, streams=streams)

    def register(self, version: Version) -> None:
        """Make the version's weights known, before a phase asks for them."""
        if version.folder is not None and not version.is_adapter:
            self._folders[version.id] = version.folder

    def holds(self, version: Version) -> bool:
        """Whether these engines may have it loaded, or read its files."""
        return version.id in self._folders or version.id in self._adapters

    async def retire(self, version: Version) -> None:
        """Remove its files as soon as no engine needs them; nobody samples it any more."""
        if version.is_adapter:
            await self._adapters.retire(version)
        elif version.id in self._folders:
            self._retired.add(version.id)
            await self._remove_retired()
        else:
            await asyncio.to_thread(remove, version.folder)

    async def _remove_retired(self) -> None:
        # Kept while the engines hold them: one that restarts loads them from this folder.
        current = self._manager.weight_version() if self._manager is not None else BASE
        for name in self._retired - {current}:
            self._retired.discard(name)
            self._live.forget(name)
            await asyncio.to_thread(remove, self._folders.pop(name, None))

    async def _folder_of(self, weights: str) -> Path:
        if weights not in self._folders:
            raise VersionLost(weights)
        return self._folders[weights]

    def _up(self) -> RolloutManager:
        if self._manager is None:
            raise EngineDied(f"the engines of {self._settings.name} are not running")
        return self._manager


class AdapterCache:
    """The adapters that engines have loaded: at most `slots`, unless more are in use at once."""

    def __init__(self, slots: int):
        self._slots = slots
        self._users: OrderedDict[str, int] = OrderedDict()  # of loaded ones, in order of last use
        self._retired: dict[str, Version] = {}
        self._change = asyncio.Lock()  # loads and unloads, one at a time

    def __len__(self) -> int:
        return len(self._users)

    def __contains__(self, name: str) -> bool:
        return name in self._users

    def clear(self) -> None:
        """The engines have ended."""
        self._users.clear()
        for version in self._retired.values():
            remove(version.folder)
        self._retired.clear()

    @asynccontextmanager
    async def use(self, manager: RolloutManager, version: Version) -> AsyncIterator[None]:
        """Loaded for the length of the block."""
        async with self._change:
            await self._load(manager, version)
            self._users[version.id] += 1
            self._users.move_to_end(version.id)
        try:
            yield
        finally:
            if version.id in self._users:  # `clear` may have come in between
                self._users[version.id] -= 1

    async def retire(self, version: Version) -> None:
        """A loaded one is unloaded at the next use of another: engines may be offloaded now, and
        answer no calls then."""
        async with self._change:
            if version.id in self._users:
                self._retired[version.id] = version
            else:
                await asyncio.to_thread(remove, version.folder)

    async def _load(self, manager: RolloutManager, version: Version) -> None:
        for name in [name for name in self._retired if not self._users.get(name)]:
            await self._unload(manager, name)
            await asyncio.to_thread(remove, self._retired.pop(name).folder)
        if version.id in self._users:
            return
        unused = [name for name, users in self._users.items() if not users]
        for name in unused[: max(0, len(self._users) - self._slots + 1)]:
            await self._unload(manager, name)
        assert version.folder is not None
        await manager.load_adapter(version.id, version.folder)
        self._users[version.id] = 0

    async def _unload(self, manager: RolloutManager, name: str) -> None:
        self._users.pop(name, None)
        await manager.unload_adapter(name)


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
