"""CUDA graphs of the decode step and of the draw: one for each number of rows, width of tables and
use of adapters.

A graph is captured when a step of its kind first comes, on that step's own numbers: to compute
them again changes nothing. Graphs share one memory pool: they never run in parallel (see
`sampling.cuda_streams`), and their results are copied out of it. Where capturing fails, and on a
CPU, the same step runs without a graph.

Axes: B rows, W blocks of a table, V vocabulary.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.decoding import device_scan
from tinkercloud.decoding.sampler import RowParams, Scanned
from tinkercloud.embedded.forward.adapter_bank import AdapterBank
from tinkercloud.embedded.forward.decode_step import HEAD, Step
from tinkercloud.embedded.forward.hidden_states import LayerStates

logger = logging.getLogger(__name__)

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs the work at least once; returns a call that repeats it on the buffers' content at that time.
Raises RuntimeError where work cannot be captured."""

MAX_ROWS = 256
MAX_GRAPHS = 64
_SMALL, _FINE, _COARSE = (1, 2, 4, 8), range(16, 65, 8), range(80, MAX_ROWS + 1, 16)
BUCKETS = (*_SMALL, *_FINE, *_COARSE)


def bucket_for(num_rows: int) -> int | None:
    """The rows of the smallest step that has as many; None: no step has."""
    return next((size for size in BUCKETS if size >= num_rows), None)


def width_for(num_blocks: int, max_blocks: int, *, any_width: bool) -> int:
    """The width of tables of `num_blocks`; max_blocks: of the longest context. any_width: the
    step's time does not depend on the width, so that few widths are enough."""
    width, factor = (64, 4) if any_width else (8, 2)
    while width < num_blocks:
        width *= factor
    return max(8, min(width, -(-max_blocks // 8) * 8))


class Kind(NamedTuple):
    """bank: the generation of the adapters' tensors, or -1 for a step without adapters."""

    num_rows: int
    width: int
    bank: int


class Graphs:
    """Captured graphs by kind; the least recently used are dropped first."""

    def __init__(self, capture: Capture | None, name: str):
        self._capture, self._name = capture, name
        self._replays: OrderedDict[Kind, Callable[[], None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replays)

    def run(self, kind: Kind, work: Callable[[], None]) -> None:
        """Run the work, which is the same for a kind; by its graph where there is one."""
        if kind in self._replays:
            self._replays.move_to_end(kind)
            self._replays[kind]()
        elif self._capture is None or not self._add(kind, work):
            work()

    def _add(self, kind: Kind, work: Callable[[], None]) -> bool:
        """Capture and run it. False: it cannot be captured, and was not run."""
        assert self._capture is not None
        for old in [k for k in self._replays if -1 < k.bank < kind.bank]:
            del self._replays[old]  # they read tensors that the bank has freed
        while len(self._replays) >= MAX_GRAPHS:
            self._replays.popitem(last=False)
        start = time.perf_counter()
        try:
            replay = self._capture(work)
            replay()
        except RuntimeError as error:
            logger.warning("no CUDA graphs: %s goes on without them, slower: %s", self._name, error)
            self._capture = None
            self._replays.clear()
            return False
        self._replays[kind] = replay
        logger.info(
            "captured %s of %d rows, %d blocks%s in %.0f ms",
            *(self._name, kind.num_rows, kind.width, ", adapters" if kind.bank >= 0 else ""),
            (time.perf_counter() - start) * 1000,
        )
        return True


class DecodeGraphs:
    """Of one Step. The buffers are as large as the largest step needs, from the start: a graph
    reads fixed addresses.

    states: MAX_ROWS rows for the outputs of the layers that a drafter reads, the same layers in
    every step; None: it reads none.
    """

    def __init__(
        self,
        model: Step,
        device: torch.device,
        capture: Capture | None,
        max_width: int,
        states: LayerStates | None = None,
    ):
        config = model.architecture.config
        dtype = model.weights["model.embed_tokens"].dtype
        self._model, self._graphs = model, Graphs(capture, "the decode step")
        self._packed = torch.zeros(MAX_ROWS * (HEAD + max_width), dtype=torch.int32, device=device)
        self._states = states
        self._out = torch.zeros(MAX_ROWS, config.vocab_size, dtype=dtype, device=device)

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, packed: NDArray[np.int32], bank: AdapterBank | None, num_real: int) -> Tensor:
        """packed: `decode_step.Rows.packed` -> logits (num_real, V), the caller's to keep."""
        num_rows, columns = packed.shape
        buffer = self._packed[: packed.size].view(num_rows, columns)
        buffer.copy_(torch.from_numpy(packed))
        out = self._out[:num_rows]
        states = None if self._states is None else self._states.rows(num_rows)
        kind = Kind(num_rows, columns - HEAD, -1 if bank is None else bank.generation)
        self._graphs.run(kind, lambda: self._model.step(buffer, bank, out, states))
        return out[:num_real].clone()

    @property
    def layers(self) -> tuple[int, ...]:
        return () if self._states is None else self._states.layers

    def captured(self, num_real: int) -> Tensor:
        """The outputs of `layers` in the last step, (num_real, L, D), the caller's to keep."""
        assert self._states is not None, "no layers' outputs were kept"
        return self._states.out[:num_real].clone()


class DrawGraphs:
    """A `sampler.Scan`: graphs for rows without top-k and top-p, else `device_scan.scan`."""

    def __init__(self, capture: Capture | None):
        self._capture = capture
        self._logits = self._params = self._scanned = torch.zeros(0, 0)
        self._graphs = Graphs(capture, "the draw")

    def __call__(self, logits: Tensor, rows: Sequence[RowParams]) -> Scanned:
        num_rows = bucket_for(len(rows))
        if num_rows is None or any(row.is_plain and row.is_cut for row in rows):
            return device_scan.scan(logits, rows)
        self._fit(logits)
        padded, params = self._logits[:num_rows], self._params[:num_rows]
        padded[: len(rows)].copy_(logits)
        params[: len(rows)].copy_(torch.from_numpy(device_scan.packed(rows)))
        scanned = self._scanned[:num_rows]

        def draw() -> None:
            scanned.copy_(device_scan.find(padded, params))

        self._graphs.run(Kind(num_rows, 0, -1), draw)
        return device_scan.read(scanned[: len(rows)].cpu().numpy())

    def _fit(self, logits: Tensor) -> None:
        """Buffers for logits of this vocabulary, type and device."""
        size, buffer = logits.shape[-1], self._logits
        if (buffer.shape[-1], buffer.dtype, buffer.device) == (size, logits.dtype, logits.device):
            return
        self._graphs = Graphs(self._capture, "the draw")
        self._logits = logits.new_zeros(MAX_ROWS, size)
        self._params = torch.zeros(MAX_ROWS, 4, dtype=torch.int64, device=logits.device)
        columns = 3 + 2 * min(device_scan.CANDIDATES + 1, size)
        self._scanned = torch.zeros(MAX_ROWS, columns, dtype=torch.int64, device=logits.device)


class CudaCapture:
    """`Capture` by CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        self._anchor: torch.cuda.CUDAGraph | None = None
        self._warm_up = torch.cuda.Stream()  # one for all: torch reuses a few streams in turn

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        warm_up = self._warm_up
        warm_up.wait_stream(torch.cuda.current_stream())
        # Kernels are compiled and workspaces allocated outside the graph: capture forbids both.
        with torch.cuda.stream(warm_up):
            work()
            work()
        torch.cuda.current_stream().wait_stream(warm_up)
        torch.cuda.synchronize()
        if self._anchor is None:
            # A pool whose graphs are all gone takes no others (PyTorch asserts that it is used).
            self._anchor = self._captured(lambda: torch.zeros(1, device="cuda"))
        return self._captured(work).replay

    def _captured(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # "thread_local": calls of other threads to the device would otherwise end the capture.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            work()
        return graph
