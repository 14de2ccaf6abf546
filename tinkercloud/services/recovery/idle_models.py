"""Memory of what nobody uses just now: models and published weights go to the disk, as they are.

A model's next operation brings it back (`recovery`), a sampler's next sample publishes its weights
again; results are the same to the bit. Nothing is deleted here.
"""

import asyncio
import logging

from tinkercloud.core.lanes import Lanes
from tinkercloud.errors import TinkercloudError
from tinkercloud.services.recovery.recovery import Recovery
from tinkercloud.services.recovery.snapshots import Key
from tinkercloud.services.recovery.version_store import Published, VersionStore, version_key
from tinkercloud.storage.metadata import MetadataStorage

logger = logging.getLogger(__name__)

SHORTEST_S, LONGEST_S = 0.05, 30.0
"""Between two looks for what is idle."""
PAUSE_S = 2.0
"""Of a client that trains, between two requests: so long its model makes no room for others."""


class IdleModels:
    """idle_s: how long something is unused before it goes to the disk."""

    def __init__(
        self,
        lanes: Lanes,
        metadata: MetadataStorage,
        recovery: Recovery,
        versions: VersionStore,
        idle_s: float,
    ):
        self._lanes = lanes
        self._metadata = metadata
        self._recovery = recovery
        self._versions = versions
        self._idle_s = idle_s
        self._num_offloaded = 0

    async def run_forever(self) -> None:
        if not self._recovery.is_offered:
            return
        while True:
            await asyncio.sleep(min(max(self._idle_s / 4, SHORTEST_S), LONGEST_S))
            await self.offload_unused(self._idle_s)

    async def offload_unused(self, seconds: float) -> None:
        """What nothing has used for so long."""
        for key in self._recovery.unused_for(seconds):
            await self.offload(key)
        for published in self._versions.unused_for(seconds):
            await self.evict(published)

    async def make_room(self) -> bool:
        """Put away the model that was unused longest; False: there is none."""
        for key in self._recovery.unused_for(PAUSE_S):
            if await self.offload(key):
                return True
        return False

    async def offload_session(self, user: str, session_id: str) -> bool:
        """What a session has in memory; that it shares with others, and what this backend cannot
        bring back, stays. False: so does what cannot be kept just now."""
        stays = False
        for owner, model_id in list(self._recovery.positions):
            if owner == user and model_id.startswith(f"{session_id}:"):
                stays |= not await self.offload((owner, model_id))
        for sampler in await self._metadata.samplers_of_session(session_id, user):
            published = self._versions.find(version_key(sampler))
            if published is not None and published.model is not None:
                stays |= self._recovery.is_offered and not await self.evict(published)
            elif published is not None:
                await self._versions.leave(published.key, sampler.sampler_id)
        return not stays

    async def offload(self, key: Key) -> bool:
        """Whether its memory is free now; not where operations run or wait."""
        if not self._lanes.is_idle(*key):
            return False
        try:
            is_away = await self._recovery.offload(self._lanes, key)
        except TinkercloudError as error:  # nothing is lost: there is a next time
            logger.warning("%s stays where it is: %s", key[1], error)
            return False
        if is_away:
            self._num_offloaded += 1
            logger.info("%s went to the disk; its next use brings it back", key[1])
        return is_away

    async def evict(self, published: Published) -> bool:
        """Free what a sampler holds in memory; samples underway end as they would have. False: it
        cannot be kept just now."""
        try:
            await self._recovery.keep_version(published)
            await self._versions.evict(published)
        except (TinkercloudError, OSError) as error:
            logger.warning("%s stays in memory: %s", published.key, error)
            return False
        return True

    def stats(self) -> dict[str, float]:
        return {"models_put_away_total": self._num_offloaded}
