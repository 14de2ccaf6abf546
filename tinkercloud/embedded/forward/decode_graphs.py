"""CUDA graphs of the decode step and of the draw: one for each number of rows, width of tables and
use of adapters.

A graph is captured when a step of its kind first comes, on that step's own numbers, which may be
computed again and again. Graphs share one memory pool: they never run side by side (see `lanes`),
and what they leave behind is copied out of it. Where capturing fails, and on a CPU, the same step
runs as it is.

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
"""Runs the work at least once; returns what repeats it on the numbers that then lie in its buffers.
Raises RuntimeError where that cannot be done."""

MAX_ROWS = 256
MAX_GRAPHS = 64
_SMALL, _FINE, _COARSE = (1, 2, 4, 8), range(16, 65, 8), range(80, MAX_ROWS + 1, 16)
BUCKETS = (*_SMALL, *_FINE, *_COARSE)


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


class Kind(NamedTuple):
    """bank: the generation of the adapters' tensors, or -1 for a step without adapters."""

    num_rows: int
    width: int
    bank: int


class Graphs:
    """What has been captured, by kind; the longest unused are given up first."""

    def __init__(self, capture: Capture | None, what: str):
        self._capture, self._what = capture, what
        self._replays: OrderedDict[Kind, Callable[[], None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replays)

    def run(self, kind: Kind, work: Callable[[], None]) -> None:
        """Do the work, which is the same for a kind; by its graph where there is one."""
        if kind in self._replays:
            self._replays.move_to_end(kind)
            self._replays[kind]()
        elif self._capture is None or not self._captured(kind, work):
            work()

    def _captured(self, kind: Kind, work: Callable[[], None]) -> bool:
        assert self._capture is not None
        for old in [k for k in self._replays if -1 < k.bank < kind.bank]:
            del self._replays[old]  # their adapters' tensors are gone
        while len(self._replays) >= MAX_GRAPHS:
            self._replays.popitem(last=False)
        begun = time.perf_counter()
        try:
            replay = self._capture(work)
            replay()
        except RuntimeError as error:
            logger.warning("no CUDA graphs: %s goes on without them, slower: %s", self._what, error)
            self._capture = None
            self._replays.clear()
            return False
        self._replays[kind] = replay
        logger.info(
            "captured %s of %d rows, %d blocks%s in %.0f ms",
            *(self._what, kind.num_rows, kind.width, ", adapters" if kind.bank >= 0 else ""),
            (time.perf_counter() - begun) * 1000,
        )
        return True


class DecodeGraphs:
    """Of one Step, which puts out the same layers' states every time. The buffers are as large as
    the largest step needs, from the start.

    states: the buffer of these, MAX_ROWS rows of it; None: none are wanted.
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
        """What `layers` put out in the last step, (num_real, L, D), the caller's to keep."""
        assert self._states is not None, "no layers are wanted"
        return self._states.out[:num_real].clone()


class DrawGraphs:
    """A `sampler.Scan`: graphs for rows without top-k and top-p, else `device_scan.scan`."""

    def __init__(self, capture: Capture | None):
        self._capture = capture
        self._logits = self._params = self._found = torch.zeros(0, 0)
        self._graphs = Graphs(capture, "the draw")

    def __call__(self, logits: Tensor, rows: Sequence[RowParams]) -> Scanned:
        num_rows = bucket_for(len(rows))
        if num_rows is None or any(row.is_cut for row in rows):
            return device_scan.scan(logits, rows)
        self._fit(logits)
        given, params = self._logits[:num_rows], self._params[:num_rows]
        given[: len(rows)].copy_(logits)
        params[: len(rows)].copy_(torch.from_numpy(device_scan.packed(rows)))
        found = self._found[:num_rows]

        def draw() -> None:
            found.copy_(device_scan.find(given, params))

        self._graphs.run(Kind(num_rows, 0, -1), draw)
        return device_scan.read(found[: len(rows)].cpu().numpy())

    def _fit(self, logits: Tensor) -> None:
        """Buffers for logits of that kind."""
        size, held = logits.shape[-1], self._logits
        if (held.shape[-1], held.dtype, held.device) == (size, logits.dtype, logits.device):
            return
        self._graphs = Graphs(self._capture, "the draw")
        self._logits = logits.new_zeros(MAX_ROWS, size)
        self._params = torch.zeros(MAX_ROWS, 4, dtype=torch.int64, device=logits.device)
        columns = 3 + 2 * min(device_scan.CANDIDATES + 1, size)
        self._found = torch.zeros(MAX_ROWS, columns, dtype=torch.int64, device=logits.device)


class CudaCapture:
    """`Capture` by CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        self._beside = torch.cuda.Stream()  # one: torch has few, and gives them out again in turn

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        beside = self._beside
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
