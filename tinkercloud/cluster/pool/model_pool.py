"""ModelPool: the GPUs of one base's adapters, or of one full-parameter model, and what runs there.

A pool takes its placement group at first need. Ranks and engines start in the first phase that
needs them, and again after a failure. Closing releases everything.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TypeVar

from tinkercloud.cluster.gpus.phases import Phases
from tinkercloud.cluster.gpus.placement import (
    Placement,
    Placer,
    Request,
    Slot,
    release,
    rollout_indices,
    train_indices,
)
from tinkercloud.cluster.pool.engine_group import EngineGroup
from tinkercloud.cluster.pool.live_weights import LiveWeights
from tinkercloud.cluster.pool.versions import Version
from tinkercloud.cluster.rollout.manager import RolloutSettings
from tinkercloud.cluster.rollout.token_streams import TokenStreams
from tinkercloud.cluster.training.rank_actors import MILES_RANK, GroupSettings
from tinkercloud.cluster.training.train_group import RayTrainGroup
from tinkercloud.core.types import SampleOutput, SampleRequest
from tinkercloud.errors import EngineDied
from tinkercloud.planning.plan import Plan

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
# The plan counts adapters on the GPUs (max_loras_per_batch); SGLang keeps further ones in host
# memory and swaps them in by batch.
HOST_SLOTS_PER_SLOT = 4


@dataclass(frozen=True, slots=True)
class PoolSettings:
    group: GroupSettings
    rollout: RolloutSettings
    request: Request

    @property
    def plan(self) -> Plan:
        return self.group.plan

    @property
    def train_indices(self) -> list[int]:
        """Bundles of the ranks. Miles places its own ranks; our one rank only drives it."""
        return [0] if self.group.rank_class == MILES_RANK else train_indices(self.plan)

    @property
    def rollout_indices(self) -> list[int]:
        indices = rollout_indices(self.plan)
        return list(range(len(indices))) if self.group.rank_class == MILES_RANK else indices


class ModelPool:
    """waiting: why there are no GPUs yet, in words for a user."""

    def __init__(self, settings: PoolSettings, placer: Placer):
        plan = settings.plan
        self._settings = settings
        self._placer = placer
        self._placement: Placement | None = None
        self._is_probed = True  # False: nodes may have been lost since the placement was probed
        self._opening = asyncio.Lock()
        self._closed = False
        slots = HOST_SLOTS_PER_SLOT * (plan.sglang.max_loras_per_batch or 1)
        self.group = RayTrainGroup(settings.group, self._train_slots, placer.link)
        self.live = LiveWeights(self.group, plan, settings.request.device, self._training)
        self.engines = EngineGroup(
            settings.rollout, self._rollout_places, self.live, placer.link, slots=slots
        )
        self.phases = Phases(self.group, self.engines, colocated=plan.rollout.colocated)
        self.waiting: str | None = None
        self.num_active = 0

    @property
    def plan(self) -> Plan:
        return self._settings.plan

    @property
    def is_open(self) -> bool:
        return self._placement is not None

    @property
    def placement(self) -> Placement | None:
        return self._placement

    @property
    def is_idle(self) -> bool:
        """Nothing would be lost if it were closed: versions are on disk."""
        return not self.num_active and not self.group.model_ids

    def stats(self) -> dict[str, float | int | str]:
        return {**self.group.stats(), **self.engines.stats(), **self.phases.stats()}

    async def train(self, operation: Callable[[RayTrainGroup], Awaitable[Result]]) -> Result:
        """Run it in the training phase. Raises EngineDied when the ranks die underway."""
        self.num_active += 1
        try:
            await self._open()
            for _ in range(2):
                async with self.phases.training():
                    if self.group.alive:
                        return await self._run(operation)
                    # They died since the last operation: the next entry starts new ones.
                    await self._lose_train()
            raise EngineDied(f"the ranks of {self._settings.group.name} keep dying")
        finally:
            self.num_active -= 1

    def _training(self) -> AbstractAsyncContextManager[None]:
        return self.phases.training()

    async def _run(self, operation: Callable[[RayTrainGroup], Awaitable[Result]]) -> Result:
        try:
            return await operation(self.group)
        finally:
            if not self.group.alive:
                await asyncio.shield(self._lose_train())

    async def _lose_train(self) -> None:
        self._is_probed = False
        await self.phases.lose_train()

    async def sample(
        self, version: Version, request: SampleRequest, streams: TokenStreams | None = None
    ) -> SampleOutput:
        """Where the engines die, they are started again and it is sampled again, once."""
        self.num_active += 1
        try:
            await self._open()
            self.engines.register(version)
            try:
                return await self._sample(version, request, streams)
            except EngineDied as died:
                if self._closed:
                    raise
                logger.warning("%s: sampling again: %s", self._settings.group.name, died)
            return await self._sample(version, request, streams)
        finally:
            self.num_active -= 1

    async def _sample(
        self, version: Version, request: SampleRequest, streams: TokenStreams | None
    ) -> SampleOutput:
        async with self.phases.sampling(version.weights):
            try:
                return await self.engines.sample(version, request, streams)
            except EngineDied:
                self._is_probed = False
                await asyncio.shield(self.phases.lose_rollout())
                raise

    async def close(self) -> None:
        """End everything, forget the models, give the GPUs back."""
        self._closed = True
        await self.phases.close()
        try:
            await asyncio.gather(self.group.close(), self.engines.discard())
        finally:
            placement, self._placement = self._placement, None
            if placement is not None and self._placer.link.lost is None:
                await release(placement)

    async def forget_ray(self) -> None:
        """Ray is lost, and with it all that ran there: GPUs are taken anew at the next need."""
        self._placement, self._is_probed = None, True
        await asyncio.gather(self.group.discard(), self.engines.discard())

    # ---- GPUs

    async def _open(self) -> None:
        async with self._opening:
            if self._closed:
                raise EngineDied(f"the GPUs of {self._settings.group.name} were given back")
            if self._placement is None:
                placement = await self._placer.take(self._settings.request, self._set_waiting)
                if self._closed:  # while it waited
                    await release(placement)
                    raise EngineDied(f"the GPUs of {self._settings.group.name} were given back")
                self._placement = placement

    def _set_waiting(self, reason: str | None) -> None:
        self.waiting = reason

    async def _restored(self) -> Placement:
        """The placement, with bundles of lost nodes moved to others."""
        await self._open()  # Ray may have been lost since
        assert self._placement is not None
        if not self._is_probed:
            self._placement = await self._placer.restore(self._placement, self._set_waiting)
            self._is_probed = True
        return self._placement

    async def _train_slots(self) -> Sequence[Slot]:
        return (await self._restored()).slots(self._settings.train_indices)

    async def _rollout_places(self) -> list[list[Slot]]:
        slots = (await self._restored()).slots(self._settings.rollout_indices)
        tp = self.plan.rollout.tp
        return [slots[first : first + tp] for first in range(0, len(slots), tp)]
