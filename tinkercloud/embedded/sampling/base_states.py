"""What the sampling engine keeps for each base model: runner, blocks, speculation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tinkercloud.decoding.sampler import Scan
from tinkercloud.embedded.forward.kv_blocks import BlockPool, KVLayout, blocks_for
from tinkercloud.embedded.forward.runners import Runner, runner_for
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.sampling.block_reservation import KVCache
from tinkercloud.embedded.sampling.sequences import Sequence
from tinkercloud.embedded.sampling.speculator import Speculator

Speculate = Callable[[BaseModel, Runner, BlockPool], Speculator | None]
"""Makes what drafts for the samples of a base; None: nothing does."""


@dataclass(frozen=True, slots=True)
class BaseState:
    """What the versions of one base share."""

    base: BaseModel
    cache: KVCache
    runner: Runner
    speculation: Speculator | None


class BaseStates:
    """By base model. kv_cache_bytes: for the blocks of each."""

    def __init__(self, kv_cache_bytes: int, num_threads: int, speculate: Speculate | None):
        self._kv_cache_bytes, self._num_threads = kv_cache_bytes, num_threads
        self._speculate = speculate
        self._states: dict[int, BaseState] = {}
        self._runner: Runner | None = None  # one: all bases have one device and number type

    def __iter__(self) -> Iterator[BaseState]:
        return iter(self._states.values())

    def __getitem__(self, base: BaseModel) -> BaseState:
        """Of a base that was opened."""
        return self._states[id(base)]

    def cache_of(self, base: BaseModel) -> KVCache:
        return self._states[id(base)].cache

    def discard(self, sample: Sequence) -> None:
        """Its tokens are dropped: nothing is drafted for it any more."""
        speculation = self[sample.job.version.base].speculation
        if speculation is not None:
            speculation.end(sample)

    @property
    def scan(self) -> Scan | None:
        return self._runner.scan if self._runner is not None else None

    @torch.inference_mode()
    def open(self, base: BaseModel) -> None:
        """Allocate blocks, choose a runner, make drafters; nothing where that was done."""
        if id(base) in self._states:
            return
        if self._runner is None:
            self._runner = runner_for(base, self._num_threads)
        pool = self._pool(base, self._runner.kv_layout(base))
        cache = KVCache(pool, self._runner.is_exact)
        speculation = None
        if self._speculate is not None:
            with torch.inference_mode(False):  # drafts are trained: no inference tensors
                speculation = self._speculate(base, self._runner, pool)
        self._states[id(base)] = BaseState(base, cache, self._runner, speculation)

    def forget(self, version_id: str) -> None:
        """Nothing of a version is shared or kept any more."""
        for state in self._states.values():
            state.cache.pool.forget(version_id)
            if state.speculation is not None:
                state.speculation.forget(version_id)

    def close(self) -> None:
        """Drop all bases' blocks and drafters: after an error their content is unknown."""
        for state in self._states.values():
            if state.speculation is not None:
                state.speculation.end_all()
        self._states.clear()
        self.rest()

    def rest(self) -> None:
        """There is no request: runners keep no version's tensors."""
        if self._runner is not None:
            self._runner.rest()

    def _pool(self, base: BaseModel, layout: KVLayout) -> BlockPool:
        per_block = BlockPool.bytes_per_block(base.config, base.dtype, layout)
        num_blocks = self._kv_cache_bytes // per_block
        if base.device.type == "cpu":
            # Blocks take memory when they are first written: room for one context costs nothing.
            whole_context = blocks_for(base.config.max_position_embeddings) + 1
            num_blocks = max(num_blocks, whole_context)
        return BlockPool(base.config, base.dtype, base.device, num_blocks, layout)
