"""The cluster backend: Ray places, Megatron-core trains, SGLang samples.

All adapters of a base model share one pool of GPUs, which stays open; a full-parameter model has a
pool of its own, which closes with it. Pools open at first need. Published versions are on disk and
outlive pools: those of a model whose pool is closed are sampled from its base's pool.

This file runs in the API process: no torch; Ray is imported when the backend starts.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tinkercloud.backends.base import Backend
from tinkercloud.cluster.base_models import MODELS_FOLDER, BaseModel, BaseModels
from tinkercloud.cluster.cpu.presence import refuse_cuda
from tinkercloud.cluster.gpus.placement import Placer, num_lost
from tinkercloud.cluster.gpus.ray_link import RayLink
from tinkercloud.cluster.gpus.ray_session import RaySession
from tinkercloud.cluster.pool.model_pool import ModelPool
from tinkercloud.cluster.pool.versions import Version, VersionFolders, new_id, remove
from tinkercloud.cluster.rollout.token_streams import TokenStreams
from tinkercloud.cluster.training.restore_points import STATE_FILE, link_files
from tinkercloud.cluster.training.train_group import RayTrainGroup
from tinkercloud.cluster.weights import worker_jobs
from tinkercloud.config import Config
from tinkercloud.core.types import (
    AdamParams,
    FromBase,
    FromCheckpoint,
    FromModel,
    LoraSpec,
    OnTokens,
    SampleOutput,
    SampleRequest,
    ServedModel,
    TrainBatch,
    TrainOutput,
    WeightsSource,
)
from tinkercloud.errors import (
    BaseModelNotServed,
    ConfigError,
    ModelStateLost,
    UserError,
    VersionLost,
)
from tinkercloud.planning.engine_arguments import serves_adapter

logger = logging.getLogger(__name__)

ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")


@dataclass(frozen=True, slots=True)
class _Model:
    base: BaseModel
    spec: LoraSpec
    pool: ModelPool


@dataclass(slots=True)
class _Published:
    version: Version
    users: int = 0
    released: bool = False


class ClusterBackend(Backend):
    """See the module."""

    def __init__(self, config: Config):
        if not config.models:
            raise ConfigError("no model to serve; pass --model NAME=PATH or `tinkercloud fetch`")
        if config.speculate not in ("auto", "off"):
            raise ConfigError(
                f"--speculate {config.speculate} is for the embedded backend: SGLang samples for "
                "the cluster; drop it, and name a drafter of SGLang's by "
                '--cluster-sglang-args "--speculative-algorithm EAGLE ..."'
            )
        self._config = config
        self._link = RayLink()
        self._ray = RaySession(config.cluster, self._link, self._forget_ray)
        self._placer = Placer(self._close_idle_pool, self._link)
        self._folders = VersionFolders(config.data_dir / "cluster" / "versions")
        self._planner: BaseModels | None = None
        self._bases: dict[str, BaseModel] = {}
        self._base_pools: dict[str, ModelPool] = {}  # by base model, for adapters
        self._full_pools: dict[str, ModelPool] = {}  # by model id, of full-parameter models
        self._models: dict[str, _Model] = {}
        self._creating: dict[str, ModelPool] = {}  # by id of a model that is being created
        self._versions: dict[str, _Published] = {}

    # ---- life

    async def start(self) -> tuple[ServedModel, ...]:
        shape = await self._ray.start()
        try:
            if self._config.cluster.device == "cpu":
                await worker_jobs.run(self._link, refuse_cuda)
            await asyncio.to_thread(self._folders.clear)
            await asyncio.to_thread(remove, self._config.data_dir / MODELS_FOLDER)
            self._planner = BaseModels(self._config, shape, self._link)
            for source in self._config.models:
                self._bases[source.name] = await self._planner.read(source)
        except BaseException:  # cancelled too: Ray must not outlive this process
            await self._ray.stop()
            raise
        return tuple(base.served for base in self._bases.values())

    async def stop(self) -> None:
        pools = self._pools()
        self._base_pools, self._full_pools = {}, {}
        self._models.clear()
        self._versions.clear()
        await _each(pool.close() for pool in pools)
        await self._ray.stop()

    def stats(self) -> dict[str, float | int | str]:
        stats: dict[str, float | int | str] = {
            "backend": "cluster",
            "models": len(self._models),
            "versions": len(self._versions),
            "pools": len(self._pools()),
        }
        for name, pool in {**self._base_pools, **self._full_pools}.items():
            stats |= {f"{name}: {key}": value for key, value in pool.stats().items()}
        return stats

    def trouble(self) -> str | None:
        return self._ray.trouble

    async def readiness(self) -> Mapping[str, str | None]:
        if self.trouble() is not None:
            return {"engine": self.trouble(), "placement": self.trouble()}
        placements = [p for pool in self._pools() if (p := pool.placement) is not None]
        count = await num_lost(placements)
        lost = f"{count} of the placed GPUs are on nodes that Ray has lost" if count else None
        return {"engine": None, "placement": lost}

    async def _forget_ray(self) -> None:
        await _each(pool.forget_ray() for pool in self._pools())

    def queue_state(self, subject: str) -> str | None:
        pool = self._creating.get(subject)
        if pool is None and subject in self._models:
            pool = self._models[subject].pool
        if pool is None and subject in self._versions:
            pool = self._pool_of(self._versions[subject].version)
        return None if pool is None else pool.waiting

    # ---- models

    async def create_model(self, model_id: str, base_model: str, lora: LoraSpec) -> None:
        base = self._base(base_model)
        _check_rank(lora, base)
        async with self._creation(model_id, base, lora) as pool:
            await pool.train(lambda group: group.create(model_id, lora))

    async def load_model(
        self, model_id: str, base_model: str, directory: Path, *, with_optimizer: bool
    ) -> LoraSpec:
        base = self._base(base_model)
        spec = await asyncio.to_thread(_spec_of, directory)
        _check_rank(spec, base)
        async with self._creation(model_id, base, spec) as pool:
            return await pool.train(
                lambda group: group.load(model_id, directory, with_optimizer=with_optimizer)
            )

    @asynccontextmanager
    async def _creation(
        self, model_id: str, base: BaseModel, spec: LoraSpec
    ) -> AsyncIterator[ModelPool]:
        """The pool for a new model; one that was opened for it is closed when the block fails."""
        old = self._models.get(model_id)
        pool = self._pool_for(model_id, base, spec)
        if old is not None and old.pool is not pool:
            await self.delete_model(model_id)
        self._creating[model_id], was_open = pool, pool.is_open
        try:
            yield pool
        except BaseException:  # cancelled too: a pool without a model would keep its GPUs
            if pool.is_idle and not was_open:
                await asyncio.shield(self._close(pool))
            raise
        finally:
            self._creating.pop(model_id, None)
        self._models[model_id] = _Model(base, spec, pool)

    async def delete_model(self, model_id: str) -> None:
        model = self._models.pop(model_id, None)
        if model is None:
            return
        if self._full_pools.get(model_id) is model.pool:
            await self._close(model.pool)
            return
        await model.pool.group.delete(model_id)

    async def forward_backward(self, model_id: str, batch: TrainBatch) -> TrainOutput:
        pool = self._model(model_id).pool
        if batch.forward_only:
            return await pool.train(lambda group: group.forward_only(model_id, batch))
        return await pool.train(lambda group: group.forward_backward_only(model_id, batch))

    async def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        pool = self._model(model_id).pool
        return await pool.train(lambda group: group.apply_optimizer_step(model_id, params))

    async def save_model(self, model_id: str, directory: Path, *, with_optimizer: bool) -> None:
        pool = self._model(model_id).pool
        await pool.train(
            lambda group: group.save(model_id, directory, with_optimizer=with_optimizer)
        )

    # ---- versions

    async def publish(self, source: WeightsSource) -> str:
        version_id = new_id()
        try:
            match source:
                case FromBase(base_model):
                    version = Version(version_id, self._base(base_model).name)
                case FromModel(model_id):
                    version = await self._export(version_id, model_id)
                case FromCheckpoint(base_model, directory):
                    version = await self._unpack(version_id, self._base(base_model), directory)
        except BaseException:  # cancelled too: nobody would remove the half-written folder
            await asyncio.to_thread(remove, self._folders.place(version_id))
            raise
        self._versions[version_id] = _Published(version)
        return version_id

    async def release(self, version: str) -> None:
        published = self._versions.pop(version, None)
        if published is not None:
            published.released = True
            if not published.users:
                await self._remove(published.version)

    async def sample(
        self, version: str, request: SampleRequest, on_tokens: OnTokens | None = None
    ) -> SampleOutput:
        published = self._versions.get(version)
        if published is None:
            raise VersionLost(version)
        published.users += 1
        try:
            streams = None if on_tokens is None else TokenStreams(request, on_tokens)
            pool = self._pool_of(published.version)
            return await pool.sample(published.version, request, streams)
        finally:
            published.users -= 1
            if published.released and not published.users:
                await asyncio.shield(self._remove(published.version))

    async def _export(self, version_id: str, model_id: str) -> Version:
        model = self._model(model_id)
        is_adapter = serves_adapter(model.base.plan.sglang, model.spec)
        folder = await asyncio.to_thread(self._folders.make, version_id)
        form = "adapter" if is_adapter else "merged"
        live = model.pool.live

        async def export(group: RayTrainGroup) -> None:
            await group.export(model_id, folder, form=form)
            if not is_adapter:
                live.published(version_id, model_id)

        await model.pool.train(export)
        owner = model_id if model_id in self._full_pools else None
        return Version(version_id, model.base.name, folder, is_adapter, owner)

    async def _unpack(self, version_id: str, base: BaseModel, directory: Path) -> Version:
        """A version with files of its own: the checkpoint may be deleted while it is sampled."""
        spec = await asyncio.to_thread(_spec_of, directory)
        is_adapter = serves_adapter(base.plan.sglang, spec)
        place = self._folders.place(version_id)
        if is_adapter:
            # Without the optimizer's file: SGLang's LoRA loader reads every safetensors file of
            # the folder as weights.
            await asyncio.to_thread(link_files, directory, place, ADAPTER_FILES)
            return Version(version_id, base.name, place, is_adapter=True)
        await asyncio.to_thread(self._folders.make, version_id)
        if spec.rank == 0:
            await worker_jobs.run(
                self._link, worker_jobs.full_model_folder, base.folder, directory, place
            )
        else:
            _check_rank(spec, base)
            pool = self._base_pool(base)
            await pool.train(lambda group: group.merge(directory, place))
        return Version(version_id, base.name, place)

    async def _remove(self, version: Version) -> None:
        """Nobody will sample it any more. Engines that may read its files remove these later."""
        holders = [pool for pool in self._pools() if pool.engines.holds(version)]
        for pool in holders:
            await pool.engines.retire(version)
        if not holders:
            await asyncio.to_thread(remove, version.folder)

    # ---- pools

    def _pool_for(self, model_id: str, base: BaseModel, spec: LoraSpec) -> ModelPool:
        if spec.rank > 0:
            return self._base_pool(base)
        if model_id not in self._full_pools:
            assert self._planner is not None, "the backend was started"
            plan = self._planner.plan(base.hf_config, None)
            settings = self._planner.pool_settings(model_id, base, plan)
            self._full_pools[model_id] = ModelPool(settings, self._placer)
        return self._full_pools[model_id]

    def _base_pool(self, base: BaseModel) -> ModelPool:
        if base.name not in self._base_pools:
            assert self._planner is not None, "the backend was started"
            settings = self._planner.pool_settings(base.name, base, base.plan)
            self._base_pools[base.name] = ModelPool(settings, self._placer)
        return self._base_pools[base.name]

    def _pool_of(self, version: Version) -> ModelPool:
        pool = self._full_pools.get(version.owner or "")
        return pool if pool is not None else self._base_pool(self._base(version.base_model))

    def _pools(self) -> list[ModelPool]:
        return [*self._base_pools.values(), *self._full_pools.values()]

    async def _close_idle_pool(self) -> None:
        """A request waits for GPUs: one pool that nobody uses gives its GPUs back."""
        for pool in list(self._base_pools.values()):
            if pool.is_open and pool.is_idle:
                logger.info("an idle pool is closed: a model waits for its GPUs")
                await asyncio.shield(self._close(pool))
                return

    async def _close(self, pool: ModelPool) -> None:
        # First out of the tables: whoever comes while it closes gets a new pool.
        for pools in (self._base_pools, self._full_pools):
            for name in [name for name, entry in pools.items() if entry is pool]:
                del pools[name]
        await pool.close()

    def _base(self, name: str) -> BaseModel:
        if name not in self._bases:
            raise BaseModelNotServed(name, tuple(self._bases))
        return self._bases[name]

    def _model(self, model_id: str) -> _Model:
        if model_id not in self._models:
            raise ModelStateLost(model_id)
        return self._models[model_id]


async def _each(endings: Iterable[Awaitable[None]]) -> None:
    """All of them, whatever some raise."""
    for error in await asyncio.gather(*endings, return_exceptions=True):
        if isinstance(error, BaseException):
            logger.error("a pool failed to end what it had", exc_info=error)


def _check_rank(spec: LoraSpec, base: BaseModel) -> None:
    largest = base.plan.lora_rank or 0
    if spec.rank > largest:
        raise UserError(
            f"rank {spec.rank} is more than this server planned memory for: {largest} at most "
            "(the setting cluster.lora_rank)"
        )


def _spec_of(directory: Path) -> LoraSpec:
    """Raises UserError when the folder holds no checkpoint."""
    try:
        return LoraSpec(**json.loads((directory / STATE_FILE).read_text())["lora"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"not a checkpoint of this server: {error}") from None
