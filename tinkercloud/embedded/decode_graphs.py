"""CUDA graphs of the decode step: one for each number of rows, width of tables and use of adapters.

A graph is captured when a step of its kind first comes, on that step's own numbers, which it may
compute as often as it likes. Graphs share one memory pool: they never run side by side, and what
they leave behind is copied out of it. Where capturing fails, and on a CPU, the same step runs as
it is.

Axes: B rows, W blocks of a table, V vocabulary.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.embedded.adapter_bank import AdapterBank
from tinkercloud.embedded.decode_step import HEAD, Step

logger = logging.getLogger(__name__)

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs the work at least once; returns what repeats it on the numbers that then lie in its buffers.
Raises RuntimeError where that cannot be done."""

MAX_ROWS = 256
MAX_GRAPHS = 64
_SMALL, _FINE, _COARSE = (1, 2, 4, 8), range(16, 65, 8), range(80, MAX_ROWS + 1, 16)
BUCKETS = (*_SMALL, *_FINE, *_COARSE)


class Kind(NamedTuple):
    """bank: the generation of the adapters' tensors, or -1 for a step without adapters."""

    num_rows: int
    width: int
    bank: int


def bucket_for(num_rows: int) -> int | None:
    """The fewest rows of a step that are enough; None: there is no such step."""
    return next((size for size in BUCKETS if size >= num_rows), None)


def width_for(num_blocks: int, most: int, *, any_width: bool) -> int:
    """The width of tables of `num_blocks`; most: of the longest context. any_width: the step's time
    does not depend on it, so that few widths are enough."""
    width, factor = (64, 4) if any_width else (8, 2)
    while width < num_blocks:
        width *= factor
    return max(8, min(width, -(-most // 8) * 8))


class DecodeGraphs:
    """Of one Step. The buffers are as large as the largest step needs, from the start."""

    def __init__(self, model: Step, device: torch.device, capture: Capture | None, max_width: int):
        config = model.architecture.config
        dtype = model.weights["model.embed_tokens"].dtype
        self._model, self._device, self._capture = model, device, capture
        self._packed = torch.zeros(MAX_ROWS * (HEAD + max_width), dtype=torch.int32, device=device)
        self._out = torch.zeros(MAX_ROWS, config.vocab_size, dtype=dtype, device=device)
        self._graphs: OrderedDict[Kind, Callable[[], None]] = OrderedDict()
        self.capture_ms = 0.0

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, packed: NDArray[np.int32], bank: AdapterBank | None, num_real: int) -> Tensor:
        """packed: `decode_step.Rows.packed` -> logits (num_real, V), the caller's to keep."""
        num_rows, columns = packed.shape
        buffer = self._packed[: packed.size].view(num_rows, columns)
        buffer.copy_(torch.from_numpy(packed))
        out = self._out[:num_rows]
        kind = Kind(num_rows, columns - HEAD, -1 if bank is None else bank.generation)

        def step() -> None:
            self._model.step(buffer, bank, out)

        if kind in self._graphs:
            self._graphs.move_to_end(kind)
            self._graphs[kind]()
        elif self._capture is None or not self._captured(kind, step):
            step()
        return out[:num_real].clone()

    def _captured(self, kind: Kind, step: Callable[[], None]) -> bool:
        assert self._capture is not None
        for old in [k for k in self._graphs if -1 < k.bank < kind.bank]:
            del self._graphs[old]  # their adapters' tensors are gone
        while len(self._graphs) >= MAX_GRAPHS:
            self._graphs.popitem(last=False)
        begun = time.perf_counter()
        try:
            replay = self._capture(step)
            replay()
        except RuntimeError as error:
            logger.warning("no CUDA graphs: decoding goes on without them, slower: %s", error)
            self._capture = None
            self._graphs.clear()
            return False
        took = (time.perf_counter() - begun) * 1000
        self.capture_ms += took
        self._graphs[kind] = replay
        logger.info(
            "captured the decode step of %d rows, %d blocks%s in %.0f ms",
            *(kind.num_rows, kind.width, ", adapters" if kind.bank >= 0 else "", took),
        )
        return True


class CudaCapture:
    """`Capture` by CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):  # compiles kernels and makes workspaces, outside the graph
            work()
            work()
        torch.cuda.current_stream().wait_stream(beside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Others may use the device from other threads meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            work()
        return graph.replay
