"""The actors of a train group, which are started, called and ended as one.

An operation is one call on every rank. It fails as a whole when a rank dies, when there is no
progress for too long, or when only some ranks fail. The actors cannot be used after that (`dead`
says why): ranks that are still alive may wait for ever in a collective.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tinkercloud.cluster.gpus.actor_deaths import cause_of_death, kill
from tinkercloud.cluster.gpus.placement import TRAIN_SHARE, Slot
from tinkercloud.cluster.gpus.ray_link import RayLink
from tinkercloud.cluster.training.rank_requests import BatchRequest, RankRequest
from tinkercloud.cluster.training.rank_types import BatchColumns, RankSettings
from tinkercloud.cluster.training.train_actor import (
    CONCURRENCY,
    WATCH,
    Answer,
    TrainActor,
    answer_of,
    decoded,
    packed_request,
)
from tinkercloud.core.types import TrainBatch
from tinkercloud.errors import EngineDied, UserError
from tinkercloud.planning.plan import Plan

logger = logging.getLogger(__name__)

R = TypeVar("R")

MEGATRON_RANK = "tinkercloud.cluster.training.train_rank:MegatronRank"
MILES_RANK = "tinkercloud.cluster.training.miles:MilesRank"
# An error on all ranks arrives on all at about the same time; after so long it is one rank's alone,
# and the others wait for it in a collective.
DISAGREE_S = 20.0
END_S = 30.0
INLINE_BYTES = 512 * 1024  # measured, for two ranks: 128 KiB take 4.5 ms, by the store 7.2 ms
# Kernels start in the order of their launch with one connection. Megatron relies on that to have
# communication start before the GEMM that it overlaps (tensor_parallel/layers.py).
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """folder: the base model's. state_dir: of restore points. Both must be the same folders on
    every node. prepare: see RankSettings. timeout_s: without any progress."""

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
            timeout_s=2 * self.timeout_s,  # of a collective; the group gives up first
        )


class RankActors:
    """Created by `start`. Runs one operation at a time; others queue."""

    def __init__(self, settings: GroupSettings, link: RayLink):
        self._settings = settings
        self._link = link
        self._actors: list[Any] = []
        # Ranks must see operations in one order: calls of two would interleave differently on
        # different actors, and their collectives would pair up wrongly.
        self._operation = asyncio.Lock()
        self._died = asyncio.Event()
        self._lifetimes: list[asyncio.Future[Any]] = []
        self.dead: str | None = None
        self.address = ""  # of rank 0's node, as other ranks reach it
        self.num_calls = 0
        self.busy_ms = 0.0  # the slowest rank's own time, summed over the calls

    @classmethod
    async def start(
        cls, settings: GroupSettings, slots: Sequence[Slot], link: RayLink
    ) -> "RankActors":
        """All ranks, started and connected; none are left running when it fails.

        Raises EngineDied, or what a rank raised.
        """
        ranks = cls(settings, link)
        try:
            async with asyncio.timeout(settings.start_timeout_s):
                await ranks._start(slots)
        except TimeoutError:
            await asyncio.shield(ranks.end())
            limit = f"within {settings.start_timeout_s:g} s"
            raise EngineDied(f"the ranks of {settings.name} did not start {limit}") from None
        except BaseException:  # cancelled too: actors would keep their GPUs
            await asyncio.shield(ranks.end())
            raise
        return ranks

    async def _start(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._link.check()
            self._actors.append(await asyncio.to_thread(_actor, self._settings, slot))
        self._watch()
        address = self._link.answer(self._actors[0].rendezvous.remote())
        init_method: str = await self._unless_dead(address)
        self.address = init_method.removeprefix("tcp://").rpartition(":")[0]
        rank_class = self._settings.rank_class
        ranks = [self._settings.rank(i, len(slots), init_method) for i in range(len(slots))]
        starts = [
            self._link.answer(actor.start.remote(rank_class, rank))
            for actor, rank in zip(self._actors, ranks, strict=True)
        ]
        tasks = [asyncio.ensure_future(self._unless_dead(start)) for start in starts]
        try:
            # The first failure is final: the other ranks may be waiting for the failed one.
            for completed in asyncio.as_completed(tasks):
                answer = answer_of(await completed)
                if answer.error is not None:
                    logger.error("a rank of %s failed\n%s", self._settings.name, answer.error[2])
                    raise decoded(answer.error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def call(self, request: RankRequest[R]) -> list[R]:
        """The ranks' results, in rank order.

        Raises what all ranks raised, and EngineDied when the group cannot be used any more.
        """
        # ray.put would end this process where the raylet has ended.
        self._link.check()
        message, stored = await _split(request)
        return await self._call(request.name, stored, *packed_request(message))

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        async with self._operation:
            if self.dead is not None:
                raise EngineDied(self.dead)
            self._link.check()
            calls = [self._link.answer(actor.call.remote(*arguments)) for actor in self._actors]
            answers = await self._collect(method, calls)
        failed = [answer.error for answer in answers if answer.error is not None]
        self.num_calls += 1
        self.busy_ms += max(answer.ms for answer in answers)
        if not failed:
            return [answer.value for answer in answers]
        if len(failed) < len(answers) or not all(_is_harmless(error) for error in failed):
            self._mark_dead(f"{method} failed on rank {_first_failed(answers)}: {failed[0][1]}")
            logger.error("%s: %s\n%s", self._settings.name, self.dead, failed[0][2])
            raise EngineDied(str(self.dead))
        raise decoded(failed[0])

    async def _collect(self, method: str, calls: Sequence["asyncio.Future[bytes]"]) -> list[Answer]:
        died = asyncio.ensure_future(self._died.wait())
        seen, silent_s = None, 0.0
        limit_s = self._settings.timeout_s
        pending: set[asyncio.Future[Any]] = set(calls)
        try:
            while pending:
                patience_s = min(limit_s / 4, DISAGREE_S)
                done, _ = await asyncio.wait(
                    {*pending, died}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
                )
                for call in done - {died}:
                    if call.exception() is not None:
                        self._mark_dead(f"a rank of {self._settings.name} died: {_cause(call)}")
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
                self._give_up_if_stuck(method, calls, silent_s)
        finally:
            died.cancel()
        return [answer_of(call.result()) for call in calls]

    def _give_up_if_stuck(
        self, method: str, calls: Sequence["asyncio.Future[bytes]"], silent_s: float
    ) -> None:
        answers = [answer_of(call.result()) for call in calls if call.done()]
        failed = [answer.error for answer in answers if answer.error is not None]
        if failed:
            self._mark_dead(f"{method} failed on one rank while others went on: {failed[0][1]}")
        elif silent_s >= self._settings.timeout_s:
            stuck = [rank for rank, call in enumerate(calls) if not call.done()]
            self._mark_dead(
                f"ranks {stuck} of {self._settings.name} made no progress in {method} for "
                f"{silent_s:g} s (the setting cluster.operation_timeout_s)"
            )
        if self.dead is not None:
            raise EngineDied(self.dead)

    async def _progress(self) -> int | None:
        """Summed over the ranks; None when one does not answer."""
        counts = [
            self._link.answer(actor.progress.options(concurrency_group=WATCH).remote())
            for actor in self._actors
        ]
        done, pending = await asyncio.wait(counts, timeout=self._settings.timeout_s / 4)
        if pending or any(count.exception() for count in done):
            return None
        return sum(count.result() for count in done)

    def _mark_dead(self, reason: str) -> None:
        if self.dead is None:
            self.dead = reason
            self._died.set()

    def _watch(self) -> None:
        for rank, actor in enumerate(self._actors):
            lifetime = self._link.answer(actor.lifetime.options(concurrency_group=WATCH).remote())
            self._lifetimes.append(lifetime)

            def ended(call: "asyncio.Future[Any]", rank: int = rank) -> None:
                if not call.cancelled():
                    self._mark_dead(f"rank {rank} of {self._settings.name} died: {_cause(call)}")

            lifetime.add_done_callback(ended)

    async def _unless_dead(self, call: "asyncio.Future[Any]") -> Any:
        died = asyncio.ensure_future(self._died.wait())
        try:
            await asyncio.wait({call, died}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done() or call.exception() is not None:
                raise EngineDied(self.dead or f"a rank did not start: {_cause(call)}")
            return call.result()
        finally:
            died.cancel()

    async def end(self) -> None:
        """Kill all ranks and wait until they have ended; never raises."""
        self._mark_dead(f"the ranks of {self._settings.name} were ended")
        actors, self._actors = self._actors, []
        if self._link.lost is None:
            for actor in actors:
                await kill(actor)
        if self._lifetimes:
            _, alive = await asyncio.wait(self._lifetimes, timeout=END_S)
            for lifetime in alive:
                logger.error("a rank of %s does not end", self._settings.name)
                lifetime.cancel()


def _actor(settings: GroupSettings, slot: Slot) -> Any:
    import ray

    environment = {**ENVIRONMENT, **settings.environment}
    remote: Any = ray.remote  # its annotations lack concurrency_groups
    actor_class = remote(concurrency_groups=CONCURRENCY)(TrainActor).options(
        runtime_env={"env_vars": environment}, **slot.options(TRAIN_SHARE)
    )
    return actor_class.remote()


async def _split(request: RankRequest[Any]) -> tuple[RankRequest[Any], Any]:
    """The request, and a reference to its batch: a large one goes through Ray's object store, where
    the ranks read it without a copy. For a small one the store takes longer than copies: None."""
    if not isinstance(request, BatchRequest) or request.batch is None:
        return request, None
    if _size(request.batch) <= INLINE_BYTES:
        return request, None
    import ray

    stored = await asyncio.to_thread(ray.put, BatchColumns.of(request.batch))
    return request.with_batch(None), stored


def _size(batch: TrainBatch) -> int:
    """Bytes of its arrays."""
    return sum(
        datum.tokens.nbytes + sum(array.nbytes for array in datum.inputs.values())
        for datum in batch.data
    )


def _cause(call: "asyncio.Future[Any]") -> str:
    error = call.exception()
    return "its actor ended" if error is None else cause_of_death(error)


def _is_harmless(error: tuple[str, str, str]) -> bool:
    """A refusal leaves a rank as it was; after any other error its state is unknown."""
    name = error[0]
    if not name:
        return False
    raised = decoded(error)
    return isinstance(raised, UserError) or name == "ModelStateLost"


def _first_failed(answers: Sequence[Answer]) -> int:
    return next(rank for rank, answer in enumerate(answers) if answer.error is not None)
