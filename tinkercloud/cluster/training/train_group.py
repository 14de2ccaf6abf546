"""RayTrainGroup: the ranks that train one base's adapters, or one full-parameter model.

When ranks die, hang, or fail on some of them only, the current operation fails with EngineDied and
all ranks are ended. The next `onload` starts new ones and restores every model from its restore
point: its last checkpoint with optimizer state (saved or loaded), or the new model.

A model is never rewound silently. If it was trained since its restore point, acknowledged or not,
the error of the operation that failed names the point, and the next operation fails once with
TrainingRewound, which names it again; later ones continue from there. (Clients pipeline operations:
an optim_step that was sent after a lost forward_backward must not be applied to a model without
that gradient.)
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from tinkercloud.cluster.gpus.placement import Slot
from tinkercloud.cluster.gpus.ray_link import RayLink
from tinkercloud.cluster.rollout.weight_sync import Sent, Transfer
from tinkercloud.cluster.training.rank_actors import GroupSettings, RankActors
from tinkercloud.cluster.training.rank_requests import (
    ApplyOptimizerStep,
    Checksum,
    Create,
    Delete,
    Export,
    ForwardBackwardOnly,
    ForwardOnly,
    Load,
    Offload,
    Onload,
    RankRequest,
    Save,
    SendWeights,
    Stats,
)
from tinkercloud.cluster.training.rank_types import Form, merge_outputs
from tinkercloud.cluster.training.restore_points import BEGINNING, ModelRecord, RestorePoints
from tinkercloud.core.types import AdamParams, LoraSpec, TrainBatch, TrainOutput
from tinkercloud.errors import EngineDied, ModelStateLost, TinkercloudError, TrainingRewound

logger = logging.getLogger(__name__)

R = TypeVar("R")


class RayTrainGroup:
    """slots: of the ranks, in rank order; called at every start, since nodes may be lost.

    Every operation but `onload` needs ranks; without them it raises EngineDied.
    """

    def __init__(
        self,
        settings: GroupSettings,
        slots: Callable[[], Awaitable[Sequence[Slot]]],
        link: RayLink | None = None,
    ):
        self._settings = settings
        self._link = link or RayLink()
        self._slots = slots
        self._ranks: RankActors | None = None
        self._models: dict[str, ModelRecord] = {}
        self._points = RestorePoints(settings.state_dir)
        self._num_starts = 0

    @property
    def alive(self) -> bool:
        return self._ranks is not None and self._ranks.dead is None

    @property
    def model_ids(self) -> tuple[str, ...]:
        return tuple(self._models)

    def stats(self) -> dict[str, float | int | str]:
        return {
            "ranks": self._settings.plan.layout.world if self.alive else 0,
            "rank_restarts": max(0, self._num_starts - 1),
            "models": len(self._models),
            "rank_calls": self._ranks.num_calls if self._ranks else 0,
            "rank_busy_ms": round(self._ranks.busy_ms, 3) if self._ranks else 0.0,
        }

    # ---- memory: this is a TrainSide

    async def onload(self) -> int:
        """Bytes loaded to the GPUs. Starts ranks and restores the models where there are none."""
        if self.alive:
            return sum(await self._call(Onload()))
        await self.discard()
        self._ranks = await RankActors.start(self._settings, await self._slots(), self._link)
        self._num_starts += 1
        try:
            for model_id, model in self._models.items():
                await self._restore(model_id, model)
            stats = await self._call(Stats())
        except BaseException:  # cancelled too: some models are not there yet
            await asyncio.shield(self.discard())
            raise
        return sum(size for rank in stats for name, size in rank.items() if name.endswith("_bytes"))

    async def offload(self) -> int:
        """Bytes freed on the GPUs."""
        return sum(await self._call(Offload()))

    async def discard(self) -> None:
        """End the ranks, in whatever state they are."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            await ranks.end()

    async def close(self) -> None:
        """End the ranks and forget the models."""
        await self.discard()
        self._models.clear()
        await self._points.forget_all()

    # ---- models

    async def create(self, model_id: str, spec: LoraSpec) -> None:
        await self._call(Create(model_id, spec))
        await self._register(model_id, ModelRecord(spec, BEGINNING))

    async def load(self, model_id: str, folder: Path, *, with_optimizer: bool) -> LoraSpec:
        async with self.unchanged(model_id):
            spec = (await self._call(Load(model_id, folder, with_optimizer)))[0]
        point = await self._points.keep(model_id, folder, with_optimizer=with_optimizer)
        await self._register(model_id, ModelRecord(spec, point))
        return spec

    async def save(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        model = self._record(model_id)
        with _naming_lost_training(model_id, model):
            await self._call(Save(model_id, folder, with_optimizer))
        if with_optimizer:
            old, model.unsaved = model.point, model.gradient
            model.point = await self._points.keep(model_id, folder, with_optimizer=True)
            await self._points.drop(old)

    async def delete(self, model_id: str) -> None:
        """Unknown ids are ignored."""
        if self._models.pop(model_id, None) is not None:
            await self._points.forget(model_id)
        if self.alive:
            with suppress(EngineDied):  # then it is gone as well
                await self._call(Delete(model_id))

    async def export(self, model_id: str | None, folder: Path, *, form: Form) -> None:
        """For engines: a PEFT folder, or a Hugging Face folder. model_id None: the base."""
        if model_id is not None:
            self._record(model_id)
        await self._call(Export(model_id, folder, form))

    async def merge(self, checkpoint: Path, folder: Path) -> None:
        """A Hugging Face folder of the base with a checkpoint's adapter merged in."""
        temporary = f"merging {uuid.uuid4().hex}"
        await self._call(Load(temporary, checkpoint, with_optimizer=False))
        try:
            await self._call(Export(temporary, folder, form="merged"))
        finally:
            await self._call(Delete(temporary))

    async def checksum(self, model_id: str | None) -> str:
        return (await self._call(Checksum(model_id)))[0]

    # ---- training

    async def forward_backward_only(self, model_id: str, batch: TrainBatch) -> TrainOutput:
        """Adds the gradient to the model's accumulator, or changes nothing."""
        model = self._record(model_id)
        with _naming_lost_training(model_id, model):
            async with _Training(model):
                parts = await self._call(ForwardBackwardOnly(model_id, batch))
                model.gradient = True
        return merge_outputs(parts)

    async def forward_only(self, model_id: str, batch: TrainBatch) -> TrainOutput:
        model = self._record(model_id)
        with _naming_lost_training(model_id, model):
            return merge_outputs(await self._call(ForwardOnly(model_id, batch)))

    async def apply_optimizer_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        model = self._record(model_id)
        async with model.weights_lock, _Training(model):
            # Before the call: should it be cancelled, the ranks take the step all the same.
            model.weights = object()
            try:
                with _naming_lost_training(model_id, model):
                    metrics = (await self._call(ApplyOptimizerStep(model_id, params)))[0]
            finally:
                model.gradient = False  # the ranks clear a refused gradient too
        return metrics

    # ---- weights for engines

    def state_of(self, model_id: str) -> object | None:
        """The same object as long as the model's weights are the same; None: it has none here."""
        model = self._models.get(model_id)
        return None if model is None or model.lost or model.rewound else model.weights

    @asynccontextmanager
    async def unchanged(self, model_id: str) -> AsyncIterator[None]:
        """The ranks do not change the model's weights during the block, unless they die: steps and
        loads of it wait."""
        model = self._models.get(model_id)
        async with model.weights_lock if model is not None else nullcontext():
            yield

    @property
    def address(self) -> str:
        """Of the node of rank 0. Raises EngineDied when the ranks are gone."""
        return self._running().address

    async def send_weights(self, model_id: str, transfer: Transfer) -> Sent:
        """Every rank sends its part to the engines; the ranks may be offloaded."""
        return (await self._call(SendWeights(model_id, transfer)))[0]

    # ---- inside

    async def _call(self, request: RankRequest[R]) -> list[R]:
        return await self._running().call(request)

    def _running(self) -> RankActors:
        if self._ranks is None:
            raise EngineDied(f"the ranks of {self._settings.name} are not running")
        return self._ranks

    async def _register(self, model_id: str, model: ModelRecord) -> None:
        old, self._models[model_id] = self._models.get(model_id), model
        if old is not None:
            await self._points.drop(old.point)

    def _record(self, model_id: str) -> ModelRecord:
        model = self._models.get(model_id)
        if model is None or model.lost:
            raise ModelStateLost(model_id)
        if model.rewound is not None:
            text, model.rewound = model.rewound, None
            raise TrainingRewound(text)
        return model

    async def _restore(self, model_id: str, model: ModelRecord) -> None:
        point = model.point
        try:
            if point.folder is None:
                await self._call(Create(model_id, model.spec))
            else:
                await self._call(Load(model_id, point.folder, point.with_optimizer))
        except EngineDied:
            raise
        except TinkercloudError:
            logger.exception("model %s could not be restored", model_id)
            model.lost = True
            return
        if model.unsaved:
            model.weights = object()
            model.rewound = (
                f"the training processes of model {model_id!r} died, and it was restored to "
                f"{point.label}. Training since then is lost; this operation was not executed. "
                "Later operations continue from there"
            )
            logger.warning("model %s was rewound to %s", model_id, point.label)
        model.unsaved = model.gradient = False


@contextmanager
def _naming_lost_training(model_id: str, model: ModelRecord) -> Iterator[None]:
    """The error of ranks that ended says what of the model is lost: some clients read no other."""
    try:
        yield
    except EngineDied as error:
        if not model.unsaved:
            raise
        raise EngineDied(
            f"{error}; model {model_id!r} goes back to {model.point.label}, training since then is "
            "lost, and its next operation is not executed either"
        ) from error


class _Training:
    """Marks a model as trained since its restore point, unless the operation was refused."""

    def __init__(self, model: ModelRecord):
        self._model = model
        self._before = model.unsaved

    async def __aenter__(self) -> None:
        # Before the operation: a cancelled caller does not stop the ranks.
        self._model.unsaved = True

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, TinkercloudError) and not isinstance(error, EngineDied):
            self._model.unsaved = self._before
