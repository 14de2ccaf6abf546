"""RolloutManager: the SGLang engines of one model, and which requests they get when.

Lives in the API process; every engine is a Ray actor that owns one server process. A request is
admitted while the gate is open and an engine serves its adapter and its weights. The gate closes
for `pause`, `offload` and weight updates, and drains. A sample is a pure function of its request,
so that one which an engine dropped (it died, or was ordered to abort) is sent again, to any engine.

An engine that dies is replaced in its slots, with all adapters and, where `restore` is given, the
current weights. It serves once it has them.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tinkercloud.cluster.gpus.placement import Slot
from tinkercloud.cluster.gpus.ray_link import RayLink
from tinkercloud.cluster.rollout.admission_gate import Gate
from tinkercloud.cluster.rollout.engine_client import EngineClient, EngineRefused, everywhere
from tinkercloud.cluster.rollout.engine_handle import EngineHandle, EngineStarter, settle
from tinkercloud.cluster.rollout.generate import Aborted
from tinkercloud.cluster.rollout.router import RolloutRouter
from tinkercloud.cluster.rollout.settings import RolloutSettings
from tinkercloud.cluster.rollout.token_streams import TokenStreams
from tinkercloud.core.types import SampleOutput, SampleRequest
from tinkercloud.errors import EngineDied, VersionLost

logger = logging.getLogger(__name__)

BASE = "base"  # the name of the weights that engines start with

TAGS = ("weights", "kv_cache", "cuda_graph")
_RESTART_WINDOW_S = 600.0
# Engines that may die under one request; then the request is suspected of killing them.
_MAX_DEATHS_OF_A_REQUEST = 2


class RolloutManager:
    """places: per engine the slots of its GPUs, in rank order; () outside a placement group.

    restore: name of weights -> a Hugging Face folder that holds them. key: what engines and router
    ask for.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        places: Sequence[Sequence[Slot]],
        restore: Callable[[str], Awaitable[Path]] | None = None,
        link: RayLink | None = None,
    ):
        self.key = settings.key
        self._settings = settings
        self._starter = EngineStarter(settings, link or RayLink())
        self._engines = [EngineHandle(index, tuple(place)) for index, place in enumerate(places)]
        self._restore = restore
        self._router = (
            RolloutRouter(
                settings.host or "127.0.0.1", settings.log_dir / "router.log", settings.key
            )
            if settings.router
            else None
        )
        self._adapters: dict[str, Path] = {}
        self._weights = BASE
        self._gate = Gate()
        self._change = asyncio.Lock()  # of adapters, memory, weights or engines: one at a time
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._num_samples = 0

    # ---- life

    async def start(self) -> None:
        """Start all engines, or none. Raises EngineDied with the end of the log that says why."""
        try:
            if self._router is not None:
                await self._router.start()
            await settle(self._start(engine) for engine in self._engines)
        except BaseException:  # cancelled too: all engines or none
            await asyncio.shield(self.stop())
            raise
        self._background(self._watch(), "watch")

    async def stop(self) -> None:
        """End every engine; requests underway fail with EngineDied."""
        self._stopping = True
        await self._gate.notify()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await settle(self._starter.end(engine) for engine in self._engines)
        finally:
            if self._router is not None:
                await self._router.stop()

    def get_router_address(self) -> str:
        """Of SGLang's router in front of the engines; without a router, the first engine's."""
        return self._router.url if self._router is not None else self.engine_urls()[0]

    def engine_urls(self) -> tuple[str, ...]:
        """Of the engines that are up, in order."""
        return tuple(client.url for client in self._clients())

    def engines_by_index(self) -> dict[int, str]:
        """Engine number (that of its place) -> URL, of those that are up."""
        return {engine.index: engine.up.url for engine in self._up()}

    def weight_version(self) -> str:
        """The name of the weights that engines hold, or will hold once restarted; BASE at first."""
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
        self,
        adapter: str | None,
        request: SampleRequest,
        weights: str | None = None,
        streams: TokenStreams | None = None,
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
                output = await engine.up.sample(adapter, request, left_s, streams)
                self._num_samples += request.num_samples
                return output
            except Aborted:
                logger.info("%s: a request was put back", self._settings.name)
            except EngineDied as died:
                deaths += 1
                if deaths > _MAX_DEATHS_OF_A_REQUEST or self._stopping:
                    raise
                logger.warning("%s: %s", self._settings.name, died)
                await self._check(engine, patience=0)
            finally:
                await self._gate.leave(engine)

    def _choose(self, adapter: str | None, weights: str | None) -> EngineHandle | None:
        """The least busy engine that serves it; None: wait. Raises when waiting cannot help."""
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
        serving = [e for e in self._engines if e.serves(adapter, self._weights)]
        return min(serving, key=lambda engine: engine.running, default=None)

    # ---- the gate

    async def pause(self, *, abort: bool = False) -> None:
        """Admit nobody; returns when no request runs. abort: running ones are sent again later."""
        await self._close("pause", abort=abort)

    async def resume(self) -> None:
        """Undo `pause`."""
        await self._gate.open("pause")

    async def flush_cache(self) -> None:
        """Drop cached prefixes. No request may run: SGLang refuses to flush otherwise."""
        await everywhere(self._clients(), "/flush_cache")

    async def _close(self, why: str, *, abort: bool = False) -> None:
        await self._gate.shut(why)  # first, so that no request is admitted after the abort
        if abort:
            await everywhere(self._clients(), "/abort_request", {"abort_all": True})
        await self._gate.drain()

    # ---- adapters

    async def load_adapter(self, name: str, folder: Path) -> None:
        """On every engine. folder: in PEFT's format; it must stay, since engines that are restarted
        read it again.

        Raises EngineRefused; no engine keeps the adapter then.
        """
        async with self._change:
            self._adapters[name] = folder
            try:
                await settle(engine.load_adapter(name, folder) for engine in self._up())
            except BaseException:  # cancelled too: on all engines or on none
                del self._adapters[name]
                await asyncio.shield(settle(engine.unload_adapter(name) for engine in self._up()))
                raise
        await self._gate.notify()

    async def unload_adapter(self, name: str) -> None:
        """SGLang lets running requests of it finish first. Unknown names are ignored."""
        async with self._change:
            if self._adapters.pop(name, None) is None:
                return
            await self._gate.notify()
            await settle(engine.unload_adapter(name) for engine in self._up())

    # ---- memory

    async def offload(self, tags: Sequence[str] = TAGS, *, abort: bool = False) -> int:
        """Admit nobody, and free these parts of GPU memory; returns the bytes freed.

        SGLang asserts that no request runs (`release_memory_occupation`), hence the drained gate.
        """
        async with self._change:
            await self._close("offload", abort=abort)
            before = await self._memory_used()
            await settle(engine.release(tags) for engine in self._up())
            return max(0, before - await self._memory_used())

    async def onload(self, tags: Sequence[str] = TAGS) -> int:
        """Bring them back; returns the bytes taken. Samples are admitted once no part is missing.

        An engine that died while it was offloaded is started here, with all parts, and not before:
        its GPUs were the trainer's.
        """
        async with self._change:
            before = await self._memory_used()
            dead = [engine for engine in self._engines if engine.client is None]
            alive = self._up()
            await settle([*(e.bring_back(tags) for e in alive), *(self._start(e) for e in dead)])
            taken = max(0, await self._memory_used() - before)
            if not any(engine.released for engine in self._engines):
                await self._gate.open("offload")
            return taken

    async def _memory_used(self) -> int:
        return sum(await asyncio.gather(*(self._starter.memory_used(e) for e in self._up())))

    # ---- weights

    @asynccontextmanager
    async def updating(self, weights: str) -> AsyncIterator[list[EngineClient]]:
        """The engines, idle, while the block replaces their weights by `weights`.

        When the block raises, all engines are restarted: any of them may hold a mixture of old and
        new weights.
        """
        async with self._change:
            await self._close("update")
            try:
                clients = self._clients()
                if not clients:
                    raise EngineDied(f"no engine of {self._settings.name} is up")
                # The gate stops our requests, not those that SGLang makes itself: its /health
                # generates a token. Paused, the scheduler runs no pass while weights change;
                # "retract" leaves nothing in the batch, so that the cache can be flushed.
                await everywhere(clients, "/pause_generation", {"mode": "retract"})
                yield clients
                await self._set_weights(self._up(), weights)
                await everywhere(clients, "/continue_generation", {"torch_empty_cache": False})
                self._weights = weights
            except BaseException:  # cancelled too: paused, perhaps with mixed weights
                for engine in self._up():
                    self._drop(engine)
                # One iteration of the event loop, in which the replacements queue for the lock:
                # they come before any change that is asked for later.
                await asyncio.sleep(0)
                raise
            finally:
                await self._gate.open("update")

    async def _set_weights(self, engines: Sequence[EngineHandle], weights: str) -> None:
        clients = [engine.up for engine in engines]
        # Cached prefixes are of the old weights; a released cache has none.
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

    async def _start(self, engine: EngineHandle) -> None:
        """Start it and load what the others have. Raises EngineDied, EngineRefused."""
        await self._starter.start(engine)
        try:
            for name, folder in self._adapters.items():
                await engine.load_adapter(name, folder)
            engine.weights = BASE
            if (folder := await self._folder_of_weights()) is not None:
                await engine.up.call("/update_weights_from_disk", {"model_path": str(folder)})
                await self._set_weights([engine], self._weights)
            if self._router is not None:
                await self._router.add(engine.up.url)
        except BaseException:  # cancelled too: the replacement would keep its GPUs
            await asyncio.shield(self._starter.end(engine))
            raise
        engine.serving = True
        await self._gate.notify()

    async def _folder_of_weights(self) -> Path | None:
        """From which an engine that starts loads the current weights; None: it keeps the base's."""
        if self._weights == BASE or self._restore is None:
            return None
        try:
            return await self._restore(self._weights)
        except VersionLost:
            logger.warning("%s: weights %s are lost", self._settings.name, self._weights)
            return None

    def _drop(self, engine: EngineHandle) -> None:
        """It serves no more; it is replaced in the background."""
        if engine.client is not None and not self._stopping:
            engine.serving = False
            self._background(self._replace(engine), f"replace engine {engine.index}")

    async def _replace(self, engine: EngineHandle) -> None:
        async with self._change:
            # An engine that dies while offloaded is not restarted here: its GPUs are the trainer's.
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
                    await self._start(engine)
                except (EngineDied, EngineRefused) as error:
                    logger.error("%s: engine %d: %s", self._settings.name, engine.index, error)
        await self._gate.notify()

    async def _check(self, engine: EngineHandle, patience: int) -> None:
        """Drop the engine when its process ended, or more than `patience` health checks failed."""
        client = engine.client
        if client is None or not engine.serving:
            return
        alive = await self._starter.running(engine)
        # Offloaded or paused engines cannot generate the health check's token.
        if alive and not self._gate.reasons:
            alive = await client.healthy(self._settings.health_timeout_s)
            engine.failures = 0 if alive else engine.failures + 1
            alive = alive or engine.failures <= patience
        if not alive and engine.client is client:
            logger.warning("%s: engine %d is lost", self._settings.name, engine.index)
            self._drop(engine)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._settings.health_interval_s)
            patience = self._settings.health_failures - 1
            await settle(self._check(engine, patience) for engine in self._engines)

    def _background(self, work: Any, what: str) -> None:
        task = asyncio.create_task(work, name=f"{self._settings.name}: {what}")
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("%s failed", task.get_name(), exc_info=task.exception())
