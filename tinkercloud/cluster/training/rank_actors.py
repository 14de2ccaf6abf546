"""The actors of a train group: started together, called together, ended together.

An operation is one call on every rank. It fails as a whole when a rank dies, when nothing moves
for too long, or when the ranks disagree; after that the actors are of no use (`dead` says why),
because ranks that are still alive may wait for ever in a collective.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkercloud.cluster.gpus.placement import TRAIN_SHARE, Slot
from tinkercloud.cluster.training.rank_types import BatchColumns, RankSettings
from tinkercloud.cluster.training.train_actor import (
    CONCURRENCY,
    WATCH,
    Answer,
    TrainActor,
    answer_of,
    decoded,
    packed_call,
)
from tinkercloud.core.plan import Plan
from tinkercloud.core.types import TrainBatch
from tinkercloud.errors import EngineDied, UserError

logger = logging.getLogger(__name__)

MEGATRON_RANK = "tinkercloud.cluster.training.train_rank:MegatronRank"
MILES_RANK = "tinkercloud.cluster.training.miles:MilesRank"
# Ranks that work on one thing fail together; one that fails alone leaves the others waiting.
DISAGREE_S = 20.0
END_S = 30.0
INLINE_BYTES = 512 * 1024  # measured, for two ranks: 128 KiB take 4.5 ms, by the store 7.2 ms
# Megatron overlaps communication with computing only when kernels are launched in one order.
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """folder: the base model's; state_dir: where models are kept to come back from. Both must be
    the same folders on every node. prepare: see RankSettings. timeout_s: without any progress."""

    name: str
    plan: Plan
    base_model: str
    folder: Path
    state_dir: Path
    prepare: str | None = None
    rank_class: str = MEGATRON_RANK
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    timeout_s: float = 1800.0
    start_timeout_s: float = 900.0

    def rank(self, rank: int, world_size: int, init_method: str) -> RankSettings:
        return RankSettings(
            rank=rank,
            world_size=world_size,
            init_method=init_method,
            plan=self.plan,
            base_model=self.base_model,
            folder=self.folder,
            prepare=self.prepare,
            timeout_s=2 * self.timeout_s,  # of a collective: the group notices first
        )


class RankActors:
    """Made by `start`. One operation at a time; others wait for their turn."""

    def __init__(self, settings: GroupSettings, actors: Sequence[Any]):
        self._settings = settings
        self._actors = list(actors)
        self._turn = asyncio.Lock()
        self._died = asyncio.Event()
        self._lifetimes: list[asyncio.Future[Any]] = []
        self.dead: str | None = None
        self.address = ""  # of rank 0's node, as the other ranks reach it
        self.num_calls = 0
        self.busy_ms = 0.0  # the slowest rank's own time, summed over the calls

    @classmethod
    async def start(cls, settings: GroupSettings, slots: Sequence[Slot]) -> "RankActors":
        """All ranks up and met, or none left. Raises EngineDied or what a rank raised."""
        ranks = cls(settings, [])
        try:
            async with asyncio.timeout(settings.start_timeout_s):
                await ranks._start(slots)
        except TimeoutError:
            await asyncio.shield(ranks.end())
            limit = f"within {settings.start_timeout_s:g} s"
            raise EngineDied(f"the ranks of {settings.name} did not start {limit}") from None
        except BaseException:
            await asyncio.shield(ranks.end())
            raise
        return ranks

    async def _start(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._actors.append(await asyncio.to_thread(_actor, self._settings, slot))
        self._watch()
        meeting: str = await self._unless_dead(_future(self._actors[0].meet.remote()))
        self.address = meeting.removeprefix("tcp://").rpartition(":")[0]
        starting = [
            _future(
                actor.start.remote(
                    self._settings.rank_class, self._settings.rank(i, len(slots), meeting)
                )
            )
            for i, actor in enumerate(self._actors)
        ]
        tasks = [asyncio.ensure_future(self._unless_dead(one)) for one in starting]
        try:
            # The first failure ends it: the others may be waiting for the failed one.
            for next_one in asyncio.as_completed(tasks):
                answer = answer_of(await next_one)
                if answer.error is not None:
                    logger.error("a rank of %s failed\n%s", self._settings.name, answer.error[2])
                    raise decoded(answer.error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The ranks' results, in rank order.

        Raises what all ranks raised, and EngineDied when they are of no use any more.
        """
        return await self._call(method, None, *packed_call(method, *args, **kwargs))

    async def call_on_data(self, method: str, model_id: str, batch: TrainBatch) -> list[Any]:
        """The same, for `method(model_id, batch)`: a large batch goes through the object store,
        where the ranks read it without a copy. (For a small one that takes longer than the copy.)
        """
        if _size(batch) <= INLINE_BYTES:
            return await self._call(method, None, *packed_call(method, model_id, batch))
        import ray

        stored = await asyncio.to_thread(ray.put, BatchColumns.of(batch))
        return await self._call(method, stored, *packed_call(method, model_id))

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        async with self._turn:
            if self.dead is not None:
                raise EngineDied(self.dead)
            asked = [_future(actor.call.remote(*arguments)) for actor in self._actors]
            answers = await self._collect(method, asked)
        failed = [answer.error for answer in answers if answer.error is not None]
        self.num_calls += 1
        self.busy_ms += max(answer.ms for answer in answers)
        if not failed:
            return [answer.value for answer in answers]
        if len(failed) < len(answers) or not all(_is_harmless(error) for error in failed):
            self._condemn(f"{method} failed on rank {_first_failed(answers)}: {failed[0][1]}")
            logger.error("%s: %s\n%s", self._settings.name, self.dead, failed[0][2])
            raise EngineDied(str(self.dead))
        raise decoded(failed[0])

    async def _collect(self, method: str, asked: Sequence["asyncio.Future[bytes]"]) -> list[Answer]:
        died = asyncio.ensure_future(self._died.wait())
        seen, silent_s = None, 0.0
        limit_s = self._settings.timeout_s
        pending: set[asyncio.Future[Any]] = set(asked)
        try:
            while pending:
                patience_s = min(limit_s / 4, DISAGREE_S)
                done, _ = await asyncio.wait(
                    {*pending, died}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
                )
                for one in done - {died}:
                    if one.exception() is not None:
                        self._condemn(f"a rank of {self._settings.name} died: {_cause(one)}")
                if self.dead is not None:
                    raise EngineDied(f"{self.dead} (during {method})")
                pending -= done
                if done:
                    silent_s = 0.0
                    continue
                silent_s += patience_s
                progress = await self._progress()
                if progress != seen:
                    seen, silent_s = progress, 0.0
                self._give_up_if_stuck(method, asked, silent_s)
        finally:
            died.cancel()
        return [answer_of(one.result()) for one in asked]

    def _give_up_if_stuck(
        self, method: str, asked: Sequence["asyncio.Future[bytes]"], silent_s: float
    ) -> None:
        answered = [answer_of(one.result()) for one in asked if one.done()]
        failed = [answer.error for answer in answered if answer.error is not None]
        if failed:
            self._condemn(f"{method} failed on one rank while others went on: {failed[0][1]}")
        elif silent_s >= self._settings.timeout_s:
            stuck = [rank for rank, one in enumerate(asked) if not one.done()]
            self._condemn(
                f"ranks {stuck} of {self._settings.name} made no progress in {method} for "
                f"{silent_s:g} s (the setting cluster.operation_timeout_s)"
            )
        if self.dead is not None:
            raise EngineDied(self.dead)

    async def _progress(self) -> int | None:
        """Summed over the ranks; None when one does not even answer."""
        asked = [
            _future(actor.progress.options(concurrency_group=WATCH).remote())
            for actor in self._actors
        ]
        done, pending = await asyncio.wait(asked, timeout=self._settings.timeout_s / 4)
        if pending or any(one.exception() for one in done):
            return None
        return sum(one.result() for one in done)

    def _condemn(self, reason: str) -> None:
        if self.dead is None:
            self.dead = reason
            self._died.set()

    def _watch(self) -> None:
        for rank, actor in enumerate(self._actors):
            lifetime = _future(actor.lifetime.options(concurrency_group=WATCH).remote())
            self._lifetimes.append(lifetime)

            def ended(one: "asyncio.Future[Any]", rank: int = rank) -> None:
                if not one.cancelled():
                    self._condemn(f"rank {rank} of {self._settings.name} died: {_cause(one)}")

            lifetime.add_done_callback(ended)

    async def _unless_dead(self, one: "asyncio.Future[Any]") -> Any:
        died = asyncio.ensure_future(self._died.wait())
        try:
            await asyncio.wait({one, died}, return_when=asyncio.FIRST_COMPLETED)
            if not one.done() or one.exception() is not None:
                raise EngineDied(self.dead or f"a rank did not start: {_cause(one)}")
            return one.result()
        finally:
            died.cancel()

    async def end(self) -> None:
        """Kill all ranks, and return when they are gone; never raises."""
        import ray

        self._condemn(f"the ranks of {self._settings.name} were ended")
        actors, self._actors = self._actors, []
        for actor in actors:
            await asyncio.to_thread(ray.kill, actor, no_restart=True)
        if self._lifetimes:
            _, left = await asyncio.wait(self._lifetimes, timeout=END_S)
            for one in left:
                logger.error("a rank of %s does not end", self._settings.name)
                one.cancel()


def _actor(settings: GroupSettings, slot: Slot) -> Any:
    import ray

    environment = {**ENVIRONMENT, **settings.environment}
    remote: Any = ray.remote  # its annotations do not know concurrency_groups
    maker = remote(concurrency_groups=CONCURRENCY)(TrainActor).options(
        runtime_env={"env_vars": environment}, **slot.options(TRAIN_SHARE)
    )
    return maker.remote()


def _size(batch: TrainBatch) -> int:
    """Bytes of its arrays."""
    return sum(
        datum.tokens.nbytes + sum(array.nbytes for array in datum.inputs.values())
        for datum in batch.data
    )


def _future(reference: Any) -> "asyncio.Future[Any]":
    """Errors of abandoned calls are nobody's: they are marked as seen."""
    future = asyncio.wrap_future(reference.future())
    future.add_done_callback(lambda one: one.cancelled() or one.exception())
    return future


def _cause(one: "asyncio.Future[Any]") -> str:
    lines = str(one.exception()).strip().splitlines()
    return lines[0] if lines else "its actor ended"


def _is_harmless(error: tuple[str, str, str]) -> bool:
    """Refusals leave a rank as it was; after any other error nobody knows."""
    name = error[0]
    if not name:
        return False
    raised = decoded(error)
    return isinstance(raised, UserError) or name == "ModelStateLost"


def _first_failed(answers: Sequence[Answer]) -> int:
    return next(rank for rank, answer in enumerate(answers) if answer.error is not None)
