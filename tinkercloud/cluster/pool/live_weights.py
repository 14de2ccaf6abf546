"""Weights straight from the ranks to the engines, while the ranks still hold that version.

A version is exported to disk when it is published, so that it can be served at any time. If it is
sampled before its model's next step, it need not be read from there: ranks that share the engines'
GPUs hand over handles to their tensors, others broadcast. Nothing is sent before the first sample.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Literal

from tinkercloud.cluster.gpus.placement import rollout_indices
from tinkercloud.cluster.rollout.manager import RolloutManager
from tinkercloud.cluster.rollout.weight_sync import How, Route, Sent, Transfer, send_weights
from tinkercloud.cluster.training.train_group import RayTrainGroup
from tinkercloud.planning.plan import Plan

logger = logging.getLogger(__name__)


class LiveWeights:
    """training: the phase in which the ranks are loaded, entered where they have GPUs of their own.
    how: the way weights go; None: only by disk."""

    def __init__(
        self,
        group: RayTrainGroup,
        plan: Plan,
        device: Literal["cuda", "cpu"],
        training: Callable[[], AbstractAsyncContextManager[None]],
    ):
        self._group = group
        self._plan = plan
        self._backend: Literal["nccl", "gloo"] = "nccl" if device == "cuda" else "gloo"
        self._training = training
        self._published: dict[str, tuple[str, object]] = {}
        self.how: How | None = _how(plan)

    def published(self, version_id: str, model_id: str) -> None:
        """Record that the version is of the model's present weights."""
        state = self._group.state_of(model_id)
        if state is not None and self.how is not None:
            self._published[version_id] = (model_id, state)

    def forget(self, version_id: str) -> None:
        self._published.pop(version_id, None)

    @asynccontextmanager
    async def holding(self, weights: str) -> AsyncIterator[str | None]:
        """The model whose ranks hold these weights, unchanged during the block; else None."""
        if not self._holds(weights):
            self.forget(weights)
            yield None
        elif self.how == "tensor":
            # The sampling phase has these GPUs already; entering training's would deadlock. The
            # ranks are offloaded and lend what they send (`MegatronRank.send_weights`).
            async with self._unchanged(weights) as model_id:
                yield model_id
        else:
            async with self._training(), self._unchanged(weights) as model_id:
                yield model_id

    @asynccontextmanager
    async def _unchanged(self, weights: str) -> AsyncIterator[str | None]:
        model_id = self._published[weights][0]
        async with self._group.unchanged(model_id):
            # A step may have been taken before the model's lock was ours.
            yield model_id if self._holds(weights) else None

    def _holds(self, weights: str) -> bool:
        if weights not in self._published or not self._group.alive:
            return False
        model_id, state = self._published[weights]
        return self._group.state_of(model_id) is state

    async def send(self, manager: RolloutManager, weights: str, model_id: str) -> Sent:
        """Inside `holding`. Raises EngineDied; the next attempt then goes by disk."""

        async def send(transfer: Transfer) -> Sent:
            return await self._group.send_weights(model_id, transfer)

        try:
            return await send_weights(manager, weights, self._route(), send)
        except BaseException:  # cancelled too: engines may have part of these weights
            self.forget(weights)
            raise

    def _route(self) -> Route:
        assert self.how is not None
        tp, engines = self._plan.rollout.tp, range(self._plan.rollout.engines)
        if self.how == "tensor":
            firsts = {engine: engine * tp for engine in engines}
            return Route("tensor", tp, first_ranks=firsts, backend=self._backend)
        return Route("broadcast", tp, address=self._group.address, backend=self._backend)


def _how(plan: Plan) -> How | None:
    """CUDA IPC handles can be opened on the same GPU only: each engine GPU needs a rank on it."""
    if not plan.rollout.colocated:
        return "broadcast"
    return "tensor" if len(rollout_indices(plan)) <= plan.layout.world else None
