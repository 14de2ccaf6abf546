"""One forward pass over a ragged batch: how it is computed, on which device.

Axes: M rows, W of them with logits, D hidden size, L layers, V vocabulary.
"""

from functools import partial
from typing import Protocol
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinkercloud.decoding.sampler import Candidates, Norms, Scan, row_norms
from tinkercloud.embedded.forward.adapter_bank import AdapterBank
from tinkercloud.embedded.forward.batch import Batch, RowScores
from tinkercloud.embedded.forward.decode_graphs import (
    MAX_ROWS,
    Capture,
    CudaCapture,
    DecodeGraphs,
    DrawGraphs,
    bucket_for,
    width_for,
)
from tinkercloud.embedded.forward.decode_step import Rows
from tinkercloud.embedded.forward.hidden_states import LayerStates
from tinkercloud.embedded.forward.kernel_choice import has_kernels, step_for
from tinkercloud.embedded.forward.kv_blocks import BlockPool, KVLayout, blocks_for, kv_layout_of
from tinkercloud.embedded.forward.paged_context import PagedContext
from tinkercloud.embedded.forward.rotary_table import rotary_table
from tinkercloud.embedded.forward.row_invariance import Product, is_row_invariant
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.packed_tensors import PackedTensors
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.native.bindings import AdapterTable, NativeModel, log_sum_exp, scan
from tinkercloud.embedded.native.compiler import library
from tinkercloud.embedded.native.team import Team

_BASE = "base "
_NO_STATES = torch.empty(0, 0, 0)


class Runner(Protocol):
    """is_exact: a row's bits depend on its own sequence's tokens alone, not on how they are cut
    into batches; so keys and values may be used wherever the same tokens stand, and several rows
    of a sample in one pass, as drafts need them, are each what one would be. fuses_lm_head: in
    one kernel with the LM head it computes `scores` of a batch's targets and `candidates` of rows
    that tokens are drawn from, and writes logits of those alone that keep them; the bits are those
    of logits."""

    is_exact: bool
    fuses_lm_head: bool
    scan: Scan | None  # for `decoding.sampler.sample`
    norms: Norms  # for the scores of prompts; where `is_exact`, the bits of `scan`'s

    def kv_layout(self, base: BaseModel) -> KVLayout:
        """That of the pools its passes of the base take."""
        ...

    def is_row_invariant(self, base: BaseModel) -> bool:
        """Whether a row of this base has the same bits whatever other sequences share its pass,
        as long as its own sequence is cut at the same places. So where `is_exact`."""
        ...

    def capture(self, base: BaseModel, layers: tuple[int, ...]) -> None:
        """From now on passes of the base hand out what these layers put out, and no others;
        numbered as in `speculative.head.head.HeadConfig`."""
        ...

    @property
    def captured(self) -> Tensor:
        """What these layers put out in the last pass (M, L, D), float32 on the base's device; the
        caller's to keep. Empty where there are none."""
        ...

    @property
    def scores(self) -> RowScores | None:
        """Of the last pass's targets."""
        ...

    @property
    def candidates(self) -> Candidates | None:
        """Of the last pass's rows that tokens are drawn from."""
        ...

    def forward(self, batch: Batch, pool: BlockPool) -> Tensor:
        """Logits (W, V); writes the rows' keys and values into their blocks. On a device with
        parallel streams the logits are the caller's to keep; else until the next call."""
        ...

    def rest(self) -> None:
        """Nothing is underway: keep no version's tensors."""
        ...


class NativeRunner:
    """The compiled pass on a CPU, in float32 or bfloat16 (see forward.c for what is rounded)."""

    is_exact = fuses_lm_head = True

    def __init__(self, num_threads: int):
        self.scores: RowScores | None = None
        self.candidates: Candidates | None = None
        self.team = Team(num_threads)
        self.scan: Scan | None = partial(scan, self.team)
        self.norms: Norms = partial(log_sum_exp, self.team)
        self._models: dict[str, tuple[BlockPool, NativeModel]] = {}
        self._adapters: dict[str, AdapterTable] = {}
        self._angles: dict[str, tuple[Tensor, Tensor]] = {}  # by base; they grow as needed
        self._layers: dict[str, tuple[int, ...]] = {}  # by base
        self.captured = _NO_STATES

    def kv_layout(self, base: BaseModel) -> KVLayout:
        return kv_layout_of(base.dtype)

    def is_row_invariant(self, base: BaseModel) -> bool:
        return True

    def capture(self, base: BaseModel, layers: tuple[int, ...]) -> None:
        self._layers[base.name] = layers

    def forward(self, batch: Batch, pool: BlockPool) -> Tensor:
        segments, first = [], 0
        for version, count in batch.versions:
            if version.adapter is not None:
                segments.append((first, count, version.scale, self._table(version)))
            first += count
        model = self._model(batch.versions[0][0], pool)
        rotary = self._rotary(batch.base, int(batch.positions.max()) + 1)
        layers = self._layers.get(batch.base.name, ())
        result = model.forward(self.team, batch, rotary, segments, layers)
        scores, self.captured, self.candidates = result.scores, result.captured, result.candidates
        self.scores = None if scores is None else RowScores(scores.logits, scores.norms)
        return result.logits

    def rest(self) -> None:
        self._models = {n: m for n, m in self._models.items() if n.startswith(_BASE)}
        self._adapters.clear()

    def _model(self, version: Version, pool: BlockPool) -> NativeModel:
        name = _weights_name(version)
        cached = self._models.get(name)
        if cached is not None and cached[0] is pool:
            return cached[1]
        assert pool.layout is kv_layout_of(version.base.dtype), "made for another runner"
        assert isinstance(version.weights, PackedTensors), "packed where there are the kernels"
        packed = version.weights.packed
        model = NativeModel(version.base.config, packed, pool.keys, pool.values)
        self._models[name] = (pool, model)
        return model

    def _rotary(self, base: BaseModel, num_positions: int) -> tuple[Tensor, Tensor]:
        angles = self._angles.get(base.name)
        if angles is None or len(angles[0]) < num_positions:
            angles = self._angles[base.name] = rotary_table(base.architecture, num_positions)
        return angles

    def _table(self, version: Version) -> AdapterTable:
        if version.id not in self._adapters:
            assert version.adapter is not None
            layers = version.base.config.num_layers
            self._adapters[version.id] = AdapterTable(self.team, version.adapter, layers)
        return self._adapters[version.id]


class TorchRunner:
    """The same through torch: every device and number type, and what the other is tested against.

    product: computes all products of a pass but those of attention. What is declared of rows
    follows from a measurement of it on this processor (`row_invariance`).
    """

    is_exact = False  # PyTorch's attention sums in another order where a sequence is cut elsewhere
    fuses_lm_head, scores, candidates = False, None, None
    scan: Scan | None = None

    def __init__(self, product: Product = F.linear):
        self._product, self.norms = product, row_norms
        self._layers: dict[str, tuple[int, ...]] = {}  # by base
        self.captured = _NO_STATES

    def kv_layout(self, base: BaseModel) -> KVLayout:
        return KVLayout.PLAIN

    def is_row_invariant(self, base: BaseModel) -> bool:
        types = {base.dtype, torch.float32}  # adapters' products are float32 always
        return base.device.type == "cpu" and all(is_row_invariant(t, self._product) for t in types)

    def capture(self, base: BaseModel, layers: tuple[int, ...]) -> None:
        self._layers[base.name] = layers

    def forward(self, batch: Batch, pool: BlockPool) -> Tensor:
        base = batch.base
        layers = self._layers.get(base.name, ())
        states = LayerStates.empty(layers, len(batch.tokens), base) if layers else None
        self.captured = _NO_STATES if states is None else states.out
        context = PagedContext(batch, pool, self._product)
        tokens, positions = context.padded_inputs()
        show = None if states is None else states.show
        hidden = base.architecture.hidden(context, tokens, positions, show)
        return context.unembed(base.architecture, hidden)

    def rest(self) -> None:
        """It keeps nothing."""


class GraphRunner:
    """Batches of one row per sequence take a step of fixed shapes, as a CUDA graph where there are
    such; all others go the way of TorchRunner. `capture` None: the same step without graphs.

    A step of n rows is padded to one of `decode_graphs.BUCKETS`; the last bits of a row may differ
    from bucket to bucket.
    """

    is_exact = fuses_lm_head = False
    scores = candidates = None

    def __init__(self, capture: Capture | None, scan: Scan | None = None):
        self._plain = TorchRunner()
        self._capture, self.scan, self.norms = capture, scan, row_norms
        self._graphs: dict[str, tuple[ref[BlockPool], DecodeGraphs]] = {}
        self._banks: dict[str, AdapterBank] = {}  # by base
        self._spare_blocks: WeakKeyDictionary[BlockPool, int] = WeakKeyDictionary()
        self._layers: dict[str, tuple[int, ...]] = {}  # by base
        self.captured = _NO_STATES

    def kv_layout(self, base: BaseModel) -> KVLayout:
        return KVLayout.PLAIN

    def is_row_invariant(self, base: BaseModel) -> bool:
        return False

    def capture(self, base: BaseModel, layers: tuple[int, ...]) -> None:
        self._layers[base.name] = layers
        self._plain.capture(base, layers)

    def forward(self, batch: Batch, pool: BlockPool) -> Tensor:
        logits = self._decode(batch, pool) if batch.is_decode else None
        if logits is None:
            logits = self._plain.forward(batch, pool)
            self.captured = self._plain.captured
        return logits

    def rest(self) -> None:
        self._graphs = {n: g for n, g in self._graphs.items() if n.startswith(_BASE)}
        for bank in self._banks.values():
            bank.forget()

    @torch.inference_mode()
    def _decode(self, batch: Batch, pool: BlockPool) -> Tensor | None:
        """None: this batch does not fit a step."""
        num_rows, base = bucket_for(len(batch.tokens)), batch.base
        versions = [version for version, _ in batch.versions]
        bank = self._bank(base)
        places = bank.place(versions)
        spare = self._spare_block(pool)
        if num_rows is None or places is None or spare is None:
            return None
        most = blocks_for(base.config.max_position_embeddings)
        needed = blocks_for(int(batch.positions.max()) + 1)
        width = width_for(needed, most, any_width=has_kernels(base.device, base.dtype))
        slots = np.repeat(places, [count for _, count in batch.versions])
        rows = Rows(batch.tokens, batch.positions, slots, batch.tables[batch.sequence])
        packed = rows.packed(num_rows, width, spare)
        adapters = bank if any(v.adapter is not None for v in versions) else None
        graphs = self._graphs_of(versions[0], pool)
        logits = graphs.run(packed, adapters, len(batch.tokens))
        self.captured = graphs.captured(len(batch.tokens)) if graphs.layers else _NO_STATES
        if len(batch.logit_rows) == len(batch.tokens):
            return logits
        return logits[torch.from_numpy(batch.logit_rows).to(base.device)]

    def _graphs_of(self, version: Version, pool: BlockPool) -> DecodeGraphs:
        name, base = _weights_name(version), version.base
        cached, layers = self._graphs.get(name), self._layers.get(base.name, ())
        if cached is not None and cached[0]() is pool and cached[1].layers == layers:
            return cached[1]
        longest = blocks_for(base.config.max_position_embeddings)
        width = width_for(longest, longest, any_width=False)
        states = LayerStates.empty(layers, MAX_ROWS, base) if layers else None
        graphs = DecodeGraphs(step_for(version, pool), base.device, self._capture, width, states)
        self._graphs[name] = (ref(pool), graphs)
        return graphs

    def _bank(self, base: BaseModel) -> AdapterBank:
        if base.name not in self._banks:
            self._banks[base.name] = AdapterBank(base.config.linear_shapes(), base.device)
        return self._banks[base.name]

    def _spare_block(self, pool: BlockPool) -> int | None:
        """Where padding writes; None while there is no free one."""
        if pool not in self._spare_blocks:
            taken = pool.allocate(1)
            if taken is None:
                return None
            self._spare_blocks[pool] = taken[0]
        return self._spare_blocks[pool]


def _weights_name(version: Version) -> str:
    shared = version.weights is version.base.weights
    return f"{_BASE}{version.base.name}" if shared else version.id


def runner_for(base: BaseModel, num_threads: int) -> Runner:
    """The fastest there is for the base's device and number type."""
    fits = base.device.type == "cpu" and base.dtype in (torch.float32, torch.bfloat16)
    if fits and library() is not None:
        return NativeRunner(num_threads)
    if base.device.type == "cuda":
        capture = CudaCapture()
        return GraphRunner(capture, DrawGraphs(capture))
    return TorchRunner()
