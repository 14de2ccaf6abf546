"""RolloutManager: the SGLang engines of one model, and who may sample when.

Lives in the API process; every engine is a Ray actor that owns one server process. A request is
admitted while the gate is open and an engine serves that has its adapter and its weights. The gate
closes for `pause`, `offload` and weight updates, after which nothing runs; because a sample is a
pure function of its request, one that an engine dropped (it died, or was told to abort) is simply
sent again, to whichever engine serves then.

An engine that dies is started anew in its place, with all adapters and, where `restore` is given,
the current weights; until then, and for weights that it does not hold, it does not serve.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tinkercloud.cluster.gpus.placement import Slot
from tinkercloud.cluster.rollout.admission_gate import Gate
from tinkercloud.cluster.rollout.engine_client import EngineClient, EngineRefused, everywhere
from tinkercloud.cluster.rollout.engine_handle import EngineHandle, EngineStarter
from tinkercloud.cluster.rollout.generate import Aborted
from tinkercloud.cluster.rollout.router import RolloutRouter
from tinkercloud.cluster.rollout.settings import RolloutSettings
from tinkercloud.core.plan import SglangArguments
from tinkercloud.core.types import LoraSpec, SampleOutput, SampleRequest
from tinkercloud.errors import EngineDied, VersionLost

logger = logging.getLogger(__name__)

BASE = "base"
"""The name of the weights that engines start with."""

TAGS = ("weights", "kv_cache", "cuda_graph")
_RESTART_WINDOW_S = 600.0
# One more death under the same request, and it may be the request that kills.
_DEATHS_OF_A_REQUEST = 2


class RolloutManager:
    """places: per engine the slots of its GPUs, in rank order; () outside a placement group.

    restore: given the name of weights, a Hugging Face folder that holds them.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        places: Sequence[Sequence[Slot]],
        restore: Callable[[str], Awaitable[Path]] | None = None,
    ):
        self._settings = settings
        self._starter = EngineStarter(settings)
        self._engines = [EngineHandle(index, tuple(place)) for index, place in enumerate(places)]
        self._restore = restore
        self._router = (
            RolloutRouter(settings.host or "127.0.0.1", settings.log_dir / "router.log")
            if settings.router
            else None
        )
        self._adapters: dict[str, Path] = {}
        self._weights = BASE
        self._gate = Gate()
        self._turn = asyncio.Lock()  # one change of the engines at a time
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._num_samples = 0

    # ---- life

    async def start(self) -> None:
        """Bring all engines up, or none. Raises EngineDied with the end of the log that tells."""
        try:
            if self._router is not None:
                await self._router.start()
            await _all(self._revive(engine) for engine in self._engines)
        except BaseException:
            await asyncio.shield(self.stop())
            raise
        self._background(self._watch(), "watch")

    async def stop(self) -> None:
        """End every engine; requests underway fail with EngineDied."""
        self._stopping = True
        await self._gate.tell()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await _all(self._starter.end(engine) for engine in self._engines)
        if self._router is not None:
            await self._router.stop()

    def get_router_address(self) -> str:
        """Of SGLang's router in front of the engines; without a router, the first engine's."""
        return self._router.url if self._router is not None else self.engine_urls()[0]

    def engine_urls(self) -> tuple[str, ...]:
        """Of the engines that are up, in order."""
        return tuple(client.url for client in self._clients())

    def engines_by_index(self) -> dict[int, str]:
        """EngineHandle number (its place's) -> URL, of those that are up."""
        return {engine.index: engine.up.url for engine in self._up()}

    def weight_version(self) -> str:
        """The name of the weights that engines hold or are to hold; BASE at first."""
        return self._weights

    def stats(self) -> dict[str, int | str]:
        return {
            "engines": len(self._engines),
            "engines_serving": sum(engine.serving for engine in self._engines),
            "engine_restarts": sum(max(0, engine.starts - 1) for engine in self._engines),
            "adapters": len(self._adapters),
            "running": self._gate.running,
            "samples": self._num_samples,
            "weights": self._weights,
            "closed_for": ", ".join(sorted(self._gate.reasons)),
        }

    # ---- sampling

    async def generate(
        self, adapter: str | None, request: SampleRequest, weights: str | None = None
    ) -> SampleOutput:
        """adapter None: the engines' own weights. weights: which these must be; None: any.

        Raises VersionLost when the adapter is not loaded or the weights are others, UserError for
        what the engine refuses, EngineDied when no engine comes to serve it in time.
        """
        deadline = time.monotonic() + self._settings.request_timeout_s
        deaths = 0
        while True:
            engine = await self._gate.enter(lambda: self._choose(adapter, weights), deadline)
            try:
                left_s = max(1.0, deadline - time.monotonic())
                output = await engine.up.sample(adapter, request, left_s)
                self._num_samples += request.num_samples
                return output
            except Aborted:
                logger.info("%s: a request was put back", self._settings.name)
            except EngineDied as died:
                deaths += 1
                if deaths > _DEATHS_OF_A_REQUEST or self._stopping:
                    raise
                logger.warning("%s: %s", self._settings.name, died)
                await self._check(engine, patience=0)
            finally:
                await self._gate.leave(engine)

    def _choose(self, adapter: str | None, weights: str | None) -> EngineHandle | None:
        """The least busy engine that can; None: wait. Raises when waiting would be in vain."""
        if self._stopping:
            raise EngineDied(f"the engines of {self._settings.name} are being stopped")
        if adapter is not None and adapter not in self._adapters:
            raise VersionLost(adapter)
        if weights not in (None, self._weights):
            raise VersionLost(str(weights))
        if all(engine.given_up for engine in self._engines):
            raise EngineDied(f"no engine of {self._settings.name} could be kept alive")
        if all(e.given_up or (e.serving and e.weights != self._weights) for e in self._engines):
            raise VersionLost(self._weights)
        able = [e for e in self._engines if e.serves(adapter, self._weights)]
        return min(able, key=lambda engine: engine.running, default=None)

    # ---- the gate

    async def pause(self, *, abort: bool = False) -> None:
        """Admit nobody; returns when nothing runs. abort: what runs is put back, not awaited."""
        await self._close("pause", abort=abort)

    async def resume(self) -> None:
        """Undo `pause`."""
        await self._gate.open("pause")

    async def flush_cache(self) -> None:
        """Forget cached prompts. Nothing may run."""
        await everywhere(self._clients(), "/flush_cache")

    async def _close(self, why: str, *, abort: bool = False) -> None:
        await self._gate.shut(why)
        if abort:
            await everywhere(self._clients(), "/abort_request", {"abort_all": True})
        await self._gate.empty()

    # ---- adapters

    @staticmethod
    def supports_adapter(spec: LoraSpec, arguments: SglangArguments) -> bool:
        """Whether the engines can serve such an adapter beside others; else serve its weights
        merged."""
        wanted = {"lm_head"} if spec.train_unembed else set[str]()
        wanted |= {"q_proj", "k_proj", "v_proj", "o_proj"} if spec.train_attn else set()
        wanted |= {"gate_proj", "up_proj", "down_proj"} if spec.train_mlp else set()
        return (
            arguments.enable_lora
            and 0 < spec.rank <= (arguments.max_lora_rank or 0)
            and wanted <= set(arguments.lora_target_modules)
        )

    async def load_adapter(self, name: str, folder: Path) -> None:
        """On every engine; the folder (PEFT's format) must stay, restarted engines read it again.

        Raises EngineRefused, and then no engine keeps it.
        """
        async with self._turn:
            self._adapters[name] = folder
            try:
                await _all(engine.load_adapter(name, folder) for engine in self._up())
            except BaseException:
                del self._adapters[name]
                await asyncio.shield(_all(engine.unload_adapter(name) for engine in self._up()))
                raise
        await self._gate.tell()

    async def unload_adapter(self, name: str) -> None:
        """Requests underway with it finish first. Unknown names are ignored."""
        async with self._turn:
            if self._adapters.pop(name, None) is None:
                return
            await self._gate.tell()
            await _all(engine.unload_adapter(name) for engine in self._up())

    # ---- memory

    async def offload(self, tags: Sequence[str] = TAGS, *, abort: bool = False) -> int:
        """Admit nobody, and free these parts of GPU memory; the bytes freed."""
        async with self._turn:
            await self._close("offload", abort=abort)
            before = await self._memory_used()
            await _all(engine.release(tags) for engine in self._up())
            return max(0, before - await self._memory_used())

    async def onload(self, tags: Sequence[str] = TAGS) -> int:
        """Bring them back; the bytes taken. Samples are admitted once every part is there.

        An engine that died meanwhile is started here, with all parts: not while it was offloaded,
        when its memory was another's.
        """
        async with self._turn:
            before = await self._memory_used()
            lost = [engine for engine in self._engines if engine.client is None]
            here = self._up()
            await _all([*(e.bring_back(tags) for e in here), *(self._revive(e) for e in lost)])
            taken = max(0, await self._memory_used() - before)
            if not any(engine.released for engine in self._engines):
                await self._gate.open("offload")
            return taken

    async def _memory_used(self) -> int:
        return sum(await asyncio.gather(*(self._starter.memory_used(e) for e in self._up())))

    # ---- weights

    @asynccontextmanager
    async def updating(self, weights: str) -> AsyncIterator[list[EngineClient]]:
        """The engines, idle, while their weights are replaced by `weights`.

        When the block raises, no engine is trusted any more: all are started anew. So an engine
        never serves weights half replaced.
        """
        async with self._turn:
            await self._close("update")
            try:
                clients = self._clients()
                if not clients:
                    raise EngineDied(f"no engine of {self._settings.name} is up")
                await everywhere(clients, "/pause_generation", {"mode": "retract"})
                yield clients
                await self._weights_are(self._up(), weights)
                await everywhere(clients, "/continue_generation", {"torch_empty_cache": False})
                self._weights = weights
            except BaseException:
                for engine in self._up():
                    self._lose(engine)
                # They wait for their turn before anybody who comes later.
                await asyncio.sleep(0)
                raise
            finally:
                await self._gate.open("update")

    async def _weights_are(self, engines: Sequence[EngineHandle], weights: str) -> None:
        clients = [engine.up for engine in engines]
        if not any("kv_cache" in engine.released for engine in engines):
            await everywhere(clients, "/flush_cache")
        body = {"new_version": weights, "abort_all_requests": False}
        await everywhere(clients, "/update_weight_version", body)
        for engine in engines:
            engine.weights = weights

    # ---- engines that come and go

    def _up(self) -> list[EngineHandle]:
        return [engine for engine in self._engines if engine.client is not None]

    def _clients(self) -> list[EngineClient]:
        return [engine.up for engine in self._up()]

    async def _revive(self, engine: EngineHandle) -> None:
        """Start it, and make it what the others are. Raises EngineDied, EngineRefused."""
        await self._starter.start(engine)
        try:
            for name, folder in self._adapters.items():
                await engine.load_adapter(name, folder)
            engine.weights = BASE
            folder = await self._folder_of_weights()
            if folder is not None:
                await engine.up.call("/update_weights_from_disk", {"model_path": str(folder)})
                await self._weights_are([engine], self._weights)
            if self._router is not None:
                await self._router.add(engine.up.url)
        except BaseException:
            await asyncio.shield(self._starter.end(engine))
            raise
        engine.serving = True
        await self._gate.tell()

    async def _folder_of_weights(self) -> Path | None:
        """Where an engine that starts gets the current weights; None: it keeps the base's."""
        if self._weights == BASE or self._restore is None:
            return None
        try:
            return await self._restore(self._weights)
        except VersionLost:
            logger.warning("%s: weights %s are nowhere", self._settings.name, self._weights)
            return None

    def _lose(self, engine: EngineHandle) -> None:
        """It serves no more; it is ended and, unless offloaded, started anew in the background."""
        if engine.client is not None and not self._stopping:
            engine.serving = False
            self._background(self._replace(engine), f"replace engine {engine.index}")

    async def _replace(self, engine: EngineHandle) -> None:
        async with self._turn:
            offloaded = bool(engine.released) or "offload" in self._gate.reasons
            if engine.client is None or engine.serving:
                return
            if self._router is not None:
                await self._router.remove(engine.client.url)
            await self._starter.end(engine)
            while not offloaded and not engine.serving and not engine.given_up:
                if engine.count_restart(_RESTART_WINDOW_S) > self._settings.restart_limit:
                    engine.given_up = True
                    break
                try:
                    await self._revive(engine)
                except (EngineDied, EngineRefused) as error:
                    logger.error("%s: engine %d: %s", self._settings.name, engine.index, error)
        await self._gate.tell()

    async def _check(self, engine: EngineHandle, patience: int) -> None:
        """Part with the engine when its process ended, or health checks failed beyond patience."""
        client = engine.client
        if client is None or not engine.serving:
            return
        alive = await self._starter.running(engine)
        if alive and not self._gate.reasons:
            alive = await client.healthy(self._settings.health_timeout_s)
            engine.failures = 0 if alive else engine.failures + 1
            alive = alive or engine.failures <= patience
        if not alive and engine.client is client:
            logger.warning("%s: engine %d is lost", self._settings.name, engine.index)
            self._lose(engine)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._settings.health_interval_s)
            patience = self._settings.health_failures - 1
            await _all(self._check(engine, patience) for engine in self._engines)

    def _background(self, work: Any, what: str) -> None:
        task = asyncio.create_task(work, name=f"{self._settings.name}: {what}")
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("%s failed", task.get_name(), exc_info=task.exception())


async def _all(work: Any) -> None:
    """Await everything, then raise the first error: nothing is left running unseen."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
