"""Who holds the GPUs, trainer or engines, and how memory passes from one to the other.

Where both share GPUs (colocated), one cycle is

    sampling -> offload(rollout) -> onload(train) -> training -> offload(train)
             -> onload(weights) -> update_weights -> onload(cuda_graph) -> onload(kv_cache)
             -> sampling

The order is that of slime and Miles. Trainer and engines are never resident together. Engines get
their weights' memory first and the KV cache last: the update needs room for buckets of new weights,
and a cache computed from the old ones would have to be flushed. On separate GPUs both stay resident
and only update_weights happens. A set of GPUs has one `Memory`; MOVES lists every permitted move,
any other is an assertion.

A side that fails a move is discarded, which frees what it held; it is started again when it is next
brought in. A side that fails to leave does not keep the other one out.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Protocol

logger = logging.getLogger(__name__)

WEIGHTS, CUDA_GRAPH, KV_CACHE = "weights", "cuda_graph", "kv_cache"


class TrainSide(Protocol):
    """Numbers are bytes, summed over the GPUs."""

    async def onload(self) -> int:
        """Bring everything to the GPUs; starts the ranks where there are none."""
        ...

    async def offload(self) -> int: ...

    async def discard(self) -> None:
        """Free the GPUs whatever state this is in; never raises."""
        ...


class RolloutSide(Protocol):
    """Numbers are bytes, summed over the GPUs. weights: the name of those to hold."""

    async def onload(self, tags: Sequence[str]) -> int:
        """Bring these parts back; starts the engines, with all parts, where there are none."""
        ...

    async def update_weights(self, weights: str) -> int:
        """0 where the engines hold them already."""
        ...

    async def offload(self, tags: Sequence[str]) -> int: ...

    async def discard(self) -> None:
        """Free the GPUs whatever state this is in; never raises."""
        ...


class State(Enum):
    EMPTY = "empty"
    TRAINING = "training"
    STALE = "weights loaded"  # their memory is back, but they may be of another version
    UPDATED = "weights updated"
    GRAPHS = "graphs loaded"
    SAMPLING = "sampling"


class Move(Enum):
    ONLOAD_TRAIN = "onload(train)"
    OFFLOAD_TRAIN = "offload(train)"
    DISCARD_TRAIN = "discard(train)"
    ONLOAD_WEIGHTS = "onload(weights)"
    UPDATE_WEIGHTS = "update_weights"
    ONLOAD_CUDA_GRAPH = "onload(cuda_graph)"
    ONLOAD_KV_CACHE = "onload(kv_cache)"
    OFFLOAD_ROLLOUT = "offload(rollout)"
    DISCARD_ROLLOUT = "discard(rollout)"


MOVES: dict[State, dict[Move, State]] = {
    State.EMPTY: {Move.ONLOAD_TRAIN: State.TRAINING, Move.ONLOAD_WEIGHTS: State.STALE},
    State.TRAINING: {Move.OFFLOAD_TRAIN: State.EMPTY},
    State.STALE: {Move.UPDATE_WEIGHTS: State.UPDATED},
    State.UPDATED: {Move.ONLOAD_CUDA_GRAPH: State.GRAPHS},
    State.GRAPHS: {Move.ONLOAD_KV_CACHE: State.SAMPLING},
    # The phase lock lets nobody sample meanwhile, so the cache need not leave for an update.
    State.SAMPLING: {Move.UPDATE_WEIGHTS: State.SAMPLING, Move.OFFLOAD_ROLLOUT: State.EMPTY},
}
_TRAIN_MOVES = (Move.ONLOAD_TRAIN, Move.OFFLOAD_TRAIN)
_LEAVING = (Move.OFFLOAD_TRAIN, Move.OFFLOAD_ROLLOUT)


class Memory:
    """One set of GPUs. One caller at a time may move it (the phase lock sees to that); `gpus` names
    it in the log."""

    def __init__(self, gpus: str, train: TrainSide, rollout: RolloutSide):
        self._gpus = gpus
        self._train = train
        self._rollout = rollout
        self._weights: str | None = None
        self.state = State.EMPTY
        self.num_moves = 0
        self.num_failures = 0
        self.moved_bytes = 0
        self.moving_ms = 0.0

    def is_training(self) -> bool:
        return self.state is State.TRAINING

    def is_sampling(self, weights: str) -> bool:
        return self.state is State.SAMPLING and self._weights == weights

    async def to_training(self) -> None:
        """Raises what the trainer's onload raised; the GPUs are then empty."""
        if self.state is State.SAMPLING:
            await self._offload_rollout()
        if self.state is State.EMPTY:
            await self._move(Move.ONLOAD_TRAIN, self._train.onload)
        assert self.state is State.TRAINING, self.state

    async def to_sampling(self, weights: str) -> None:
        """Raises what the engines raised; the GPUs are then empty."""
        if self.state is State.TRAINING:
            await self._move(Move.OFFLOAD_TRAIN, self._train.offload)
        if self.state is State.SAMPLING:
            await self._update(weights)
            return
        await self._move(Move.ONLOAD_WEIGHTS, lambda: self._rollout.onload((WEIGHTS,)))
        await self._update(weights)
        await self._move(Move.ONLOAD_CUDA_GRAPH, lambda: self._rollout.onload((CUDA_GRAPH,)))
        await self._move(Move.ONLOAD_KV_CACHE, lambda: self._rollout.onload((KV_CACHE,)))

    async def lose_train(self) -> None:
        """The ranks have died, or must be ended."""
        if self.state is State.TRAINING:
            await self._discard(Move.DISCARD_TRAIN)
        else:
            await self._train.discard()

    async def lose_rollout(self) -> None:
        """The engines have died, or must be ended."""
        if self.state in (State.EMPTY, State.TRAINING):
            await self._rollout.discard()
        else:
            await self._discard(Move.DISCARD_ROLLOUT)

    async def _update(self, weights: str) -> None:
        # Unknown while it runs: a failure may leave any mixture of weights on the engines.
        self._weights = None
        await self._move(Move.UPDATE_WEIGHTS, lambda: self._rollout.update_weights(weights))
        self._weights = weights

    async def _offload_rollout(self) -> None:
        tags = (KV_CACHE, CUDA_GRAPH, WEIGHTS)
        await self._move(Move.OFFLOAD_ROLLOUT, lambda: self._rollout.offload(tags))

    async def _move(self, move: Move, action: Callable[[], Awaitable[int]]) -> None:
        after = MOVES[self.state].get(move)
        assert after is not None, f"{move.value} while {self._gpus} are {self.state.value}"
        begun = time.perf_counter()
        try:
            num_bytes = await action()
        except BaseException as error:  # cancelled too: half moved, the memory's state is unknown
            self._record(move, 0, begun, failed=True)
            logger.warning("%s: %s failed: %s", self._gpus, move.value, error)
            is_trainers = move in _TRAIN_MOVES
            await self._discard(Move.DISCARD_TRAIN if is_trainers else Move.DISCARD_ROLLOUT)
            # Discarded, it has left all the same. A cancellation is not an Exception and goes on.
            if move in _LEAVING and isinstance(error, Exception):
                return
            raise
        self.state = after
        self._record(move, num_bytes, begun)

    async def _discard(self, move: Move) -> None:
        """Empty the GPUs, even where the caller is cancelled meanwhile."""
        begun = time.perf_counter()
        side = self._train if move is Move.DISCARD_TRAIN else self._rollout
        self.state, self._weights = State.EMPTY, None
        try:
            await asyncio.shield(side.discard())
        finally:
            self._record(move, 0, begun)

    def _record(self, move: Move, num_bytes: int, begun: float, *, failed: bool = False) -> None:
        ms = (time.perf_counter() - begun) * 1000
        self.num_moves += 1
        self.num_failures += failed
        self.moved_bytes += num_bytes
        self.moving_ms += ms
        logger.info(
            "%s: %s, %d bytes, %.1f ms%s",
            *(self._gpus, move.value, num_bytes, ms),
            " (failed)" if failed else "",
        )
