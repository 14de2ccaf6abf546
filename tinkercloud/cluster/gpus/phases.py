"""Training operations and samples take turns on a set of GPUs: a phase-exclusive lock.

Operations of one phase run together: all training, or all samples from the same weights. When
another phase has waiters, the current one admits newcomers for `stay_s` more (or for as long as its
last change took, since changing more often would spend most of the time on changes). It then lets
those inside finish and yields to the phase that has waited longest, which admits all its waiters.
So a waiter waits at most for that stay and the operations inside, once for each phase before it.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tinkercloud.cluster.gpus.memory import Memory, RolloutSide, TrainSide
from tinkercloud.errors import EngineDied

STAY_S = 0.2
# A lane sends its next operation once the last one's result is on disk: a few milliseconds.
LINGER_S = 0.02


@dataclass(frozen=True, slots=True)
class Phase:
    """weights None: training; else sampling from the weights of that name."""

    weights: str | None = None


TRAINING = Phase()


class PhaseLock:
    """Any number of holders of one phase at a time. change: brings the GPUs into a phase; holds:
    whether they are in it (ranks or engines may have died since)."""

    def __init__(
        self,
        change: Callable[[Phase], Awaitable[None]],
        holds: Callable[[Phase], bool],
        *,
        stay_s: float = STAY_S,
        linger_s: float = LINGER_S,
    ):
        self._change = change
        self._holds = holds
        self._stay_s = stay_s
        self._linger_s = linger_s
        self._current: Phase | None = None
        self._num_inside = 0
        self._open_until = 0.0
        self._left_at = 0.0
        self._changing = False
        self._closed = False
        self._waiting: dict[Phase, deque[asyncio.Future[None]]] = {}
        self._changed = asyncio.Event()  # who is inside, or who waits
        self._dispatcher: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def hold(self, phase: Phase) -> AsyncIterator[None]:
        """Raises what bringing the GPUs into the phase raised; EngineDied when closed."""
        await self._enter(phase)
        try:
            yield
        finally:
            self._leave()

    async def close(self) -> None:
        """Refuse all waiters and newcomers; those inside are not awaited."""
        self._closed = True
        if self._dispatcher is not None:
            self._dispatcher.cancel()
            await asyncio.gather(self._dispatcher, return_exceptions=True)
        for phase in list(self._waiting):
            self._refuse(phase, EngineDied("the model's GPUs were given back"))

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def _enter(self, phase: Phase) -> None:
        if self._closed:
            raise EngineDied("the model's GPUs were given back")
        if self._may_join(phase):
            self._num_inside += 1
            return
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(phase, deque()).append(admitted)
        self._changed.set()
        if self._dispatcher is None or self._dispatcher.done():
            self._dispatcher = asyncio.create_task(self._dispatch(), name="phases")
        try:
            await admitted
        except asyncio.CancelledError:
            self._withdraw(phase, admitted)
            raise

    def _may_join(self, phase: Phase) -> bool:
        inside = phase == self._current and not self._changing and self._holds(phase)
        return inside and (not self._waiting or time.monotonic() < self._open_until)

    def _withdraw(self, phase: Phase, admitted: "asyncio.Future[None]") -> None:
        # Admission and cancellation can come in the same iteration of the event loop: the place
        # inside was counted already and must be given back.
        if admitted.done() and not admitted.cancelled() and admitted.exception() is None:
            self._leave()
        queue = self._waiting.get(phase)
        if queue is not None and admitted in queue:
            queue.remove(admitted)
            if not queue:
                del self._waiting[phase]
            self._changed.set()

    def _leave(self) -> None:
        self._num_inside -= 1
        self._left_at = time.monotonic()
        self._changed.set()

    async def _dispatch(self) -> None:
        """Admit waiters, phase by phase, until there are none."""
        while self._waiting:
            # Cleared before looking: what changes during the look sets it again.
            self._changed.clear()
            phase = next(iter(self._waiting))
            pause_s = self._pause_s(phase)
            if self._num_inside:
                await self._changed.wait()
            elif pause_s > 0:
                await asyncio.sleep(pause_s)
            else:
                await self._open(phase)

    def _pause_s(self, phase: Phase) -> float:
        """How long the empty phase stays open for the next operation of whoever just left."""
        now = time.monotonic()
        if self._current is None or phase == self._current:
            return 0.0
        return min(self._left_at + self._linger_s, self._open_until) - now

    async def _open(self, phase: Phase) -> None:
        begun = time.monotonic()
        if phase != self._current or not self._holds(phase):
            self._changing, self._current = True, None
            try:
                await self._change(phase)
            except Exception as error:  # noqa: BLE001 - its waiters raise it
                self._refuse(phase, error)
                return
            finally:
                self._changing = False
        now = time.monotonic()
        self._current = phase
        self._open_until = now + max(self._stay_s, now - begun)
        for admitted in self._waiting.pop(phase, ()):
            if not admitted.done():
                self._num_inside += 1
                admitted.set_result(None)

    def _refuse(self, phase: Phase, error: Exception) -> None:
        for admitted in self._waiting.pop(phase, ()):
            if not admitted.done():
                admitted.set_exception(error)


class Phases:
    """The GPUs of a pool. colocated: trainer and engines share them."""

    def __init__(
        self,
        train: TrainSide,
        rollout: RolloutSide,
        *,
        colocated: bool,
        stay_s: float = STAY_S,
        linger_s: float = LINGER_S,
    ):
        names = ("shared GPUs",) * 2 if colocated else ("training GPUs", "sampling GPUs")
        self._train_memory = Memory(names[0], train, rollout)
        self._rollout_memory = self._train_memory if colocated else Memory(names[1], train, rollout)
        times = {"stay_s": stay_s, "linger_s": linger_s}
        self._train_lock = PhaseLock(self._change, self._holds, **times)
        self._rollout_lock = (
            self._train_lock if colocated else PhaseLock(self._change, self._holds, **times)
        )

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """The ranks are up for the length of the block."""
        async with self._train_lock.hold(TRAINING):
            yield

    @asynccontextmanager
    async def sampling(self, weights: str) -> AsyncIterator[None]:
        """The engines are up and hold these weights for the length of the block."""
        async with self._rollout_lock.hold(Phase(weights)):
            yield

    async def lose_train(self) -> None:
        """The ranks have died or must be ended: the next training operation starts new ones."""
        await self._train_memory.lose_train()

    async def lose_rollout(self) -> None:
        """The same for the engines."""
        await self._rollout_memory.lose_rollout()

    async def close(self) -> None:
        for lock in {self._train_lock, self._rollout_lock}:
            await lock.close()

    def stats(self) -> dict[str, float | int | str]:
        memories = self._memories()
        locks = {self._train_lock, self._rollout_lock}
        return {
            "phase": "+".join(memory.state.value for memory in memories),
            "phase_moves": sum(memory.num_moves for memory in memories),
            "phase_failures": sum(memory.num_failures for memory in memories),
            "phase_bytes": sum(memory.moved_bytes for memory in memories),
            "phase_ms": round(sum(memory.moving_ms for memory in memories), 1),
            "phase_waiting": sum(lock.num_waiting for lock in locks),
        }

    def _memories(self) -> list[Memory]:
        return list(dict.fromkeys((self._train_memory, self._rollout_memory)))

    def _holds(self, phase: Phase) -> bool:
        if phase.weights is None:
            return self._train_memory.is_training()
        return self._rollout_memory.is_sampling(phase.weights)

    async def _change(self, phase: Phase) -> None:
        if phase.weights is None:
            await self._train_memory.to_training()
        else:
            await self._rollout_memory.to_sampling(phase.weights)
