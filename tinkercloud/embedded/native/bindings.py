"""The compiled forward pass and the look at logits, called with tensors; train_bindings.py has what
training calls.

Weights, keys and values are float32, or all bfloat16; everything else is float32. Machines without
a C compiler and other devices take the path through torch (paged_context.py).
"""

import ctypes as c
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.architectures.config import ArchitectureConfig
from tinkercloud.architectures.layers import norm_scale
from tinkercloud.decoding.sampler import Candidates, RowParams, Scanned
from tinkercloud.embedded.native.drawing import Drawing, DrawnFrom, draws_of
from tinkercloud.embedded.native.packed import (
    KEYS,
    PackedWeights,
    num_key_errors,
    pack_all,
)
from tinkercloud.embedded.native.scores import Scores, Targets
from tinkercloud.embedded.native.structures import (
    ACTIVATIONS,
    MODULES,
    Batch,
    Layer,
    Linear,
    Lora,
    Model,
    Scan,
    Segment,
)
from tinkercloud.embedded.native.team import Team
from tinkercloud.weights.adapters import Adapter

KEPT_BYTES = 128 * 1024**2  # of logits, between passes


def _address(tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
    if tensor is None:
        return None
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    return tensor.data_ptr()


class Rows(Protocol):
    """What a pass computes; see `forward.batch.Batch`."""

    @property
    def tokens(self) -> NDArray[np.int64]: ...
    @property
    def positions(self) -> NDArray[np.int32]: ...
    @property
    def sequence(self) -> NDArray[np.int32]: ...
    @property
    def tables(self) -> NDArray[np.int32]: ...
    @property
    def logit_rows(self) -> NDArray[np.int64]: ...
    @property
    def targets(self) -> Targets | None: ...
    @property
    def drawn_from(self) -> DrawnFrom | None: ...


CANDIDATES = 1024  # of one row; with more, the row is drawn the plain way


def scan(team: Team, logits: Tensor, rows: Sequence[RowParams]) -> Scanned:
    """logits float32 (B, V). See `Scanned`."""
    num, size = logits.shape
    best, count = np.empty(num, np.int64), np.empty(num, np.int64)
    norm = np.empty(num, np.float64)
    ids, words = np.empty((num, CANDIDATES), np.int64), np.empty((num, CANDIDATES), np.uint32)
    out = (array.ctypes.data for array in (best, norm, count, ids, words))
    request = Scan(_address(logits), num, size, CANDIDATES, draws_of(rows), *out)
    if team.library.scan(team.handle, c.byref(request)):
        raise MemoryError(f"no memory for {num} rows of {size} logits")
    return Scanned(best, norm, count, ids, words)


def log_sum_exp(team: Team, logits: Tensor) -> Tensor:
    """Of each row of float32 logits (n, V): float64 (n,). A `decoding.sampler.Norms`."""
    num, size = logits.shape
    norms = torch.empty(num, dtype=torch.float64)
    out = norms.data_ptr()
    if team.library.log_sum_exp(team.handle, _address(logits), num, size, out):
        raise MemoryError(f"no memory for {num} rows of {size} logits")
    return norms


def step_names(team: Team) -> list[str]:
    """Of the steps of a pass, in their order."""
    team.library.step_name.restype = c.c_char_p
    num = c.c_int64.in_dll(team.library, "num_steps").value
    return [team.library.step_name(c.c_int64(step)).decode() for step in range(num)]


class AdapterTable:
    """The low-rank factors of one published adapter, packed, for forward.c."""

    def __init__(self, team: Team, adapter: Adapter, num_layers: int):
        names = [*_module_names(num_layers), "lm_head"]
        self.entries = (Lora * len(names))()
        places = [place for place, name in enumerate(names) if name in adapter]
        factors = [factor for place in places for factor in adapter[names[place]]]
        self._kept = pack_all(team, factors)
        for place, a, b in zip(places, self._kept[::2], self._kept[1::2], strict=True):
            entry = self.entries[place]
            entry.a, entry.b, entry.rank = a.address, b.address, a.shape[0]


def _module_names(num_layers: int) -> list[str]:
    return [_module_name(layer, leaf) for layer in range(num_layers) for leaf in MODULES]


def _module_name(layer: int, leaf: str) -> str:
    return f"model.layers.{layer}.{'self_attn' if leaf[0] in 'qkvo' else 'mlp'}.{leaf}"


@dataclass(frozen=True, slots=True)
class PassResult:
    """logits (W, V) of the logit rows, good until the next call; captured (M, L, D), what some
    layers put out; what was asked of targets, and of rows that tokens are drawn from."""

    logits: Tensor
    captured: Tensor
    scores: Scores | None
    candidates: Candidates | None


class _Structures:
    """What C reads of a model. It keeps the tensors that its addresses lead to."""

    def __init__(
        self,
        config: ArchitectureConfig,
        weights: PackedWeights,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ):
        self._config, self._weights = config, weights
        self._keys, self._values = list(keys), list(values)
        self._scales: list[Tensor] = []  # of norms
        self._key_dims: list[Tensor] = []
        self._num_key_errors = num_key_errors(config.head_dim, weights.dtype)
        self._layers = (Layer * config.num_layers)()
        for index, layer in enumerate(self._layers):
            self._fill(layer, index)

    def _fill(self, layer: Layer, index: int) -> None:
        config, dtype = self._config, self._weights.dtype
        path, norms = f"model.layers.{index}", config.norms
        layer.input_norm = self._norm_at(path, norms.before_attention)
        layer.mixed_norm = self._norm_at(path, norms.after_attention)
        layer.mlp_norm = self._norm_at(path, norms.before_mlp)
        layer.fed_norm = self._norm_at(path, norms.after_mlp)
        layer.q_norm = self._norm(f"{path}.self_attn.q_norm")
        layer.k_norm = self._norm(f"{path}.self_attn.k_norm")
        for place, leaf in enumerate(MODULES):
            layer.linear[place] = self._linear(_module_name(index, leaf))
        layer.keys = _address(self._keys[index], dtype)
        layer.values = _address(self._values[index], dtype)
        if self._num_key_errors:
            dims = self._weights.salient.get(f"{path}.{KEYS}")
            if dims is None:  # none is known to do more harm than another
                dims = torch.arange(self._num_key_errors).repeat(config.num_kv_heads, 1)
            assert dims.shape == (config.num_kv_heads, self._num_key_errors)
            self._key_dims.append(dims)
            layer.key_dims = _address(dims, torch.int64)
        layer.window, layer.rotary = config.scoring(index).window, config.rotary_table(index)

    def _linear(self, name: str) -> Linear:
        weight, salient = self._weights.matrices[name], self._weights.salient.get(name)
        bias = self._weights.vectors.get(f"{name}.bias")
        read = (weight.address, _address(bias), *weight.shape, weight.width)
        if salient is None:
            return Linear(*read)
        return Linear(*read, _address(salient, torch.int64), len(salient))

    def _norm(self, name: str) -> int | None:
        weight = self._weights.vectors.get(name)
        if weight is None:
            return None
        self._scales.append(norm_scale(self._config, name, weight))
        return _address(self._scales[-1])

    def _norm_at(self, path: str, leaf: str | None) -> int | None:
        return None if leaf is None else self._norm(f"{path}.{leaf}")

    def model(self) -> Model:
        config, embedding = self._config, self._weights.matrices["model.embed_tokens"]
        scoring = config.scoring(0)
        return Model(
            config.num_layers,
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            self._layers[0].linear[MODULES.index("gate_proj")].out,
            config.vocab_size,
            self._weights.dtype == torch.bfloat16,
            config.qk_norm_spans_heads,
            ACTIVATIONS.index(config.activation),
            config.num_rotated,
            config.rotary_interleaved,
            config.num_rotary_tables,
            self._num_key_errors,
            config.rms_norm_eps,
            scoring.scale,
            scoring.cap,
            config.embedding_scale,
            config.residual_scale,
            config.logit_cap,
            embedding.address,
            embedding.width,
            embedding.is_narrow,
            self._norm("model.norm"),
            self._linear("lm_head"),
            self._layers,
        )


class NativeModel:
    """One set of weights with the pool its keys and values lie in.

    matrices: by Hugging Face module name. vectors: norms and biases, float32.
    keys and values: in the weights' number type, by layer; in bfloat16 by pairs (network.h).
    times (steps, 2), for `step_names`: to what is there each pass adds how many nanoseconds each
    step took, and how many of these the first thread waited for the others; None: nobody asks.
    """

    def __init__(
        self,
        config: ArchitectureConfig,
        weights: PackedWeights,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ):
        self.config, self.dtype = config, weights.dtype
        self.times: NDArray[np.int64] | None = None
        # Kept from pass to pass: fresh memory would be cleared page by page.
        self._logits = torch.empty(0, config.vocab_size)
        self._structures = _Structures(config, weights, keys, values)
        self._model = self._structures.model()

    def forward(
        self,
        team: Team,
        rows: Rows,
        rotary: tuple[Tensor, Tensor],
        segments: Sequence[tuple[int, int, float, AdapterTable]],
        layers: Sequence[int] = (),
    ) -> PassResult:
        """Keys and values of all rows go to their blocks. layers: 1 the first; the last one's
        output is after the final norm.

        rotary: cosines and sines of all positions up to the last (P, K R / 2). segments: (first
        row, number of rows, scale, factors), disjoint.
        """
        hidden = torch.empty(len(rows.tokens), self.config.hidden_size)
        drawn_from, num_logits = rows.drawn_from, len(rows.logit_rows)
        num_kept = 0 if drawn_from is None else drawn_from.num_kept
        logits, kept_logits = self._logits_of(num_logits + num_kept).split((num_logits, num_kept))
        captured = torch.empty(len(rows.tokens), len(layers), self.config.hidden_size)
        numbers = np.array(layers, np.int64)
        fields = (rows.tokens, rows.positions, rows.sequence, rows.tables, rows.logit_rows)
        arrays = [np.ascontiguousarray(field) for field in fields]
        tokens, positions, sequence, tables, logit_rows = (a.ctypes.data for a in arrays)
        entries = (Segment * len(segments))(*[(f, n, s, t.entries) for f, n, s, t in segments])
        angles = [angle.contiguous() for angle in rotary]
        batch = Batch(
            *(len(rows.tokens), 1, 0, self.config.num_layers, None, None),
            *(tokens, positions, sequence, tables, rows.tables.shape[1]),
            *(_address(angle) for angle in angles),
            *(len(segments), entries, len(rows.logit_rows), logit_rows),
            *(len(layers), numbers.ctypes.data, _address(captured)),
            *(_address(hidden), _address(logits)),
        )
        scores = None if rows.targets is None else Scores(rows.targets)
        if scores is not None:
            batch.scores = c.pointer(scores.request)
        drawing = None if drawn_from is None else Drawing(drawn_from, kept_logits)
        if drawing is not None:
            batch.drawing = c.pointer(drawing.request)
        self.run(team, batch)
        return PassResult(logits, captured, scores, None if drawing is None else drawing.candidates)

    def run(self, team: Team, batch: Batch) -> None:
        """A pass, or a part of it. Raises MemoryError."""
        batch.times = None if self.times is None else self.times.ctypes.data
        if team.library.forward(team.handle, c.byref(self._model), c.byref(batch)):
            raise MemoryError(f"no memory for a batch of {batch.rows} rows")

    def _logits_of(self, num_rows: int) -> Tensor:
        """Memory for them. What is kept for the next pass is bounded."""
        if num_rows <= len(self._logits):
            return self._logits[:num_rows]
        logits = torch.empty(num_rows, self.config.vocab_size)
        if logits.nbytes <= KEPT_BYTES:
            self._logits = logits
        return logits
