"""An engine as the rollout manager sees it, and how its Ray actors are started and ended."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkercloud.cluster.gpus.actor_deaths import cause_of_death, kill
from tinkercloud.cluster.gpus.placement import ROLLOUT_SHARE, Slot
from tinkercloud.cluster.gpus.ray_link import RayLink
from tinkercloud.cluster.rollout.engine import Launch, RolloutEngine, server_options
from tinkercloud.cluster.rollout.engine_client import EngineClient
from tinkercloud.cluster.rollout.settings import RolloutSettings
from tinkercloud.errors import EngineDied

logger = logging.getLogger(__name__)

_ACTOR_CONCURRENCY = 4
_STOP_TIMEOUT_S = 30.0
_PROBE_TIMEOUT_S = 60.0


@dataclass(slots=True)
class EngineHandle:
    """client None: not up. adapters: loaded on it. released: tags of memory that it has released.

    running: requests sent to it and not answered. failures: health checks that failed in a row.
    """

    index: int
    slots: tuple[Slot, ...]
    actors: list[Any] = field(default_factory=list)
    client: EngineClient | None = None
    serving: bool = False
    given_up: bool = False
    weights: str = ""
    adapters: set[str] = field(default_factory=set[str])
    released: set[str] = field(default_factory=set[str])
    running: int = 0
    failures: int = 0
    starts: int = 0
    restarts_at_s: list[float] = field(default_factory=list[float])

    @property
    def up(self) -> EngineClient:
        if self.client is None:
            raise EngineDied(f"engine {self.index} is not up")
        return self.client

    def serves(self, adapter: str | None, weights: str) -> bool:
        is_ready = self.serving and self.client is not None and not self.released
        has_adapter = adapter is None or adapter in self.adapters
        return is_ready and weights == self.weights and has_adapter

    async def load_adapter(self, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        await self.up.call("/load_lora_adapter", body)
        self.adapters.add(name)

    async def unload_adapter(self, name: str) -> None:
        """Unknown names are ignored."""
        if name in self.adapters:
            self.adapters.discard(name)
            await self.up.call("/unload_lora_adapter", {"lora_name": name})

    async def release(self, tags: Sequence[str]) -> None:
        resident = [tag for tag in tags if tag not in self.released]
        if resident:
            # Before the call: should it fail halfway, the engine must not count as ready.
            self.released.update(resident)
            await self.up.call("/release_memory_occupation", {"tags": resident})

    async def bring_back(self, tags: Sequence[str]) -> None:
        """Tags that it did not release are left out: SGLang's scheduler raises KeyError for them
        (`offload_tags.remove`) and ends."""
        released = [tag for tag in tags if tag in self.released]
        if released:
            await self.up.call("/resume_memory_occupation", {"tags": released})
            self.released.difference_update(released)

    def count_restart(self, window_s: float) -> int:
        """Restarts within the window, this one included."""
        now = time.monotonic()
        self.restarts_at_s = [at for at in self.restarts_at_s if now - at < window_s] + [now]
        return len(self.restarts_at_s)


class EngineStarter:
    """Starts and ends the actors of engines: one for each node that an engine spans."""

    def __init__(self, settings: RolloutSettings, link: RayLink):
        self._settings = settings
        self._link = link

    async def start(self, engine: EngineHandle) -> None:
        """Raises EngineDied with the end of the server's log; its processes are ended then."""
        engine.starts += 1
        self._link.check()
        try:
            launches = self._launches(engine)
            engine.actors = [
                await asyncio.to_thread(_actor, launch, slot) for launch, slot in launches
            ]
            starts = [actor.start.remote() for actor in engine.actors]
            urls = await asyncio.gather(*map(self._ask, starts))
        except BaseException:  # cancelled too: its actors would keep their GPUs
            await asyncio.shield(self.end(engine))
            raise
        engine.client = EngineClient(urls[0], self._settings.served, self._settings.key)
        engine.failures = 0
        logger.info("%s: engine %d serves at %s", self._settings.name, engine.index, urls[0])

    async def end(self, engine: EngineHandle) -> None:
        """End its processes, in whatever state they are; never raises."""
        client, engine.client = engine.client, None
        actors, engine.actors = engine.actors, []
        engine.serving = False
        engine.adapters, engine.released, engine.weights = set(), set(), ""
        if client is not None:
            await client.close()
        await asyncio.gather(*(self._end(actor) for actor in actors))

    async def running(self, engine: EngineHandle) -> bool:
        """Whether all its processes run."""
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                self._link.check()
                alive = await asyncio.gather(
                    *(self._ask(a.running.remote()) for a in engine.actors)
                )
        except (EngineDied, TimeoutError):
            return False
        return bool(alive) and all(alive)

    async def memory_used(self, engine: EngineHandle) -> int:
        """Bytes in use on its GPUs."""
        if not any(slot.bundle.gpu >= 0 for slot in engine.slots):
            return 0
        self._link.check()
        used = await asyncio.gather(*(self._ask(a.memory_used.remote()) for a in engine.actors))
        return sum(used)

    async def _end(self, actor: Any) -> None:
        if self._link.lost is not None:
            return  # then so is the actor
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._ask(actor.stop.remote())
        except (EngineDied, TimeoutError) as error:
            logger.warning("an engine's actor did not stop by itself: %s", error)
        # The actor's death closes the guard's pipe, and the guard ends the server.
        await kill(actor)

    async def _ask(self, reference: Any) -> Any:
        """The answer of an actor. Raises EngineDied when the actor died."""
        from ray.exceptions import RayError, RayTaskError

        try:
            return await self._link.answer(reference)
        except RayTaskError as error:
            if isinstance(error.cause, EngineDied):
                raise EngineDied(str(error.cause)) from error
            raise
        except RayError as error:
            raise EngineDied(f"the engine's actor died: {cause_of_death(error)}") from error

    def _launches(self, engine: EngineHandle) -> list[tuple[Launch, Slot | None]]:
        settings, nodes = self._settings, _by_node(engine.slots)
        options = server_options(settings.model_path, settings.arguments, settings.kv_tokens)
        launches: list[tuple[Launch, Slot | None]] = []
        for rank, slots in enumerate(nodes):
            extra = list(settings.options)
            if len(nodes) > 1:
                address = f"{nodes[0][0].bundle.address}:{_RENDEZVOUS_PORT + engine.index}"
                extra += ["--node-rank", str(rank), "--dist-init-addr", address]
            launch = Launch(
                command=settings.command,
                options=(*options, *extra),
                log_path=settings.log_dir / f"engine-{engine.index}-node-{rank}.log",
                host=settings.host,
                gpus=tuple(slot.bundle.gpu for slot in slots if slot.bundle.gpu >= 0),
                environment=settings.environment,
                key=settings.key,
                start_timeout_s=settings.start_timeout_s,
                wait=rank == 0,
            )
            launches.append((launch, slots[0] if slots else None))
        return launches


_RENDEZVOUS_PORT = 20500
"""On the first node, for the nodes of engine 0; engine i uses this port plus i."""


def _by_node(slots: tuple[Slot, ...]) -> list[list[Slot]]:
    """In order of appearance; one empty list where there are no slots."""
    nodes: dict[str, list[Slot]] = {}
    for slot in slots:
        nodes.setdefault(slot.bundle.node_id, []).append(slot)
    return list(nodes.values()) or [[]]


def _actor(launch: Launch, slot: Slot | None) -> Any:
    import ray

    options = slot.options(ROLLOUT_SHARE) if slot is not None else {"num_cpus": 0}
    actor_class = ray.remote(RolloutEngine).options(max_concurrency=_ACTOR_CONCURRENCY, **options)
    return actor_class.remote(launch)


async def settle(work: Any) -> None:
    """Await everything, then raise the first error, so that no task goes on unobserved."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
