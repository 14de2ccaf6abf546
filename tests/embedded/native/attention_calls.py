"""The compiled attention by itself, over blocks of its own, on each instruction set there is here.

Axes: M rows, Hq/Hkv query and key/value heads, Dh head size.
"""

import ctypes as c
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tinkercloud.config import c_compiler
from tinkercloud.embedded.native import build
from tinkercloud.embedded.native.compiler import usable_sets
from tinkercloud.embedded.native.instruction_sets import (
    AMX,
    AMX_EMULATED,
    InstructionSet,
    processor_features,
    processor_sets,
)

BLOCK = 16
PAIRED_INPUTS = 32  # rows that products read in bfloat16 are padded to a multiple of them
ATTEND, PLACE, BOTH = range(3)
PARTS = (
    *("attention", "attention_by_tiles", "pairs", "team"),
    *("amx/amx_product", "amx/amx_emulated"),
)
SHIM = r"""
#include "pass.h"

typedef struct {
  pass_t *pass;
  const layer_t *layer;
  void (*step)(walk_t *, const layer_t *);
} job_t;

enum { ATTEND, PLACE, BOTH };

static void run(team_t *team, int rank, void *argument) {
  (void)rank;
  job_t *job = argument;
  walk_t walk = {.p = job->pass, .team = team, .end = 1};
  job->step(&walk, job->layer);
}

/* sizes: heads, kv_heads, head_dim, is_narrow, rows, blocks of a table, window, what to do, errors
   of a key.
   Whether it is done: both only where tiles are alone. */
int attention(team_t *team, const int64_t *sizes, float cap, const int32_t *positions,
               const int32_t *sequence, const int32_t *tables, const float *cosine,
               const float *sine, const int64_t *key_dims, float *q, float *k, float *v, void *keys,
               void *values, float *mixed, narrow *mixed_narrow) {
  model_t model = {.heads = sizes[0], .kv_heads = sizes[1], .head_dim = sizes[2],
                   .is_narrow = sizes[3], .num_rotated = sizes[2], .num_rotary = 1,
                   .key_errors = sizes[8], .score_scale = 1.0f / sqrtf((float)sizes[2]),
                   .score_cap = cap};
  layer_t layer = {.keys = keys, .values = values, .key_dims = key_dims, .window = sizes[6]};
  int64_t width = sizes[0] * sizes[2];
  batch_t batch = {.rows = sizes[4], .positions = positions, .sequence = sequence,
                   .tables = tables, .table_stride = sizes[5], .cosine = cosine, .sine = sine};
  atomic_long next_task = 0;
  pass_t pass = {.model = &model, .batch = &batch, .q = q, .k = k, .v = v, .mixed = mixed,
                 .next_task = &next_task,
                 .narrow_rows[MIXED] = {mixed_narrow, width, row_size(1, width)}};
  pass.tiles_place = sizes[7] == BOTH;
  if (pass.tiles_place && !tiles_are_alone(&pass)) return 0;
  job_t job = {&pass, &layer, sizes[7] == PLACE ? place_rows : attend};
  work(team, run, &job);
  return 1;
}
"""


def variants() -> dict[str, InstructionSet]:
    """The instruction sets that this processor has, and AMX in plain C, by name."""
    here = [each for each in processor_sets(processor_features()) if each != AMX]
    if AMX in usable_sets():  # which asks the system for the tiles
        here.append(AMX)
    return {chosen.name: chosen for chosen in (*here, AMX_EMULATED)}


def compiled(folder: Path, chosen: InstructionSet) -> c.CDLL:
    command = c_compiler()
    assert command is not None
    (folder / "shim.c").write_text(SHIM)
    parts = (build.KERNELS / f"{name}.c" for name in PARTS)
    files = (folder / "shim.c", *parts)
    out = folder / "attention.so"
    flags = (*build.compiler_flags(chosen), *build.LINK_FLAGS, f"-I{build.KERNELS}")
    arguments = [*flags, *map(str, files)]
    subprocess.run([command, *arguments, "-o", str(out), "-lm"], check=True, capture_output=True)
    library = c.CDLL(str(out))
    library.team_new.restype = c.c_void_p
    return library


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    is_narrow: bool
    window: int = 0
    cap: float = 0.0
    num_key_errors: int = 16  # at most

    @property
    def key_errors(self) -> int:
        return min(self.num_key_errors, self.head_dim) if self.is_narrow else 0


@dataclass
class Rows:
    """What attention reads: q (M, Hq, Dh), k and v (M, Hkv, Dh), positions and sequences (M,)."""

    q: NDArray[np.float32]
    k: NDArray[np.float32]
    v: NDArray[np.float32]
    positions: NDArray[np.int32]
    sequence: NDArray[np.int32]

    @classmethod
    def random(cls, shape: Shape, lengths: list[int], seed: int = 0, size: float = 1.0) -> "Rows":
        """Whole sequences of these lengths."""
        generator = np.random.default_rng(seed)

        def numbers(heads: int) -> NDArray[np.float32]:
            drawn = generator.standard_normal((sum(lengths), heads, shape.head_dim))
            return (drawn * size).astype(np.float32)

        positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
        sequence = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
        q, k, v = (numbers(n) for n in (shape.heads, shape.kv_heads, shape.kv_heads))
        return cls(q, k, v, positions, sequence)

    def __getitem__(self, rows: slice | list[int]) -> "Rows":
        arrays = (self.q, self.k, self.v, self.positions, self.sequence)
        return Rows(*(array[rows].copy() for array in arrays))


@dataclass
class Attention:
    """Blocks of some sequences of up to `length` tokens, filled with `poison`. `words`: keys and
    values as they lie there."""

    library: c.CDLL
    shape: Shape
    num_sequences: int
    length: int
    poison: float = 0.0
    num_threads: int = 1
    tables: NDArray[np.int32] = field(init=False)
    words: list[NDArray[np.generic]] = field(init=False)

    def __post_init__(self) -> None:
        shape, width = self.shape, -(-self.length // BLOCK)
        num_blocks = self.num_sequences * width
        order = np.random.default_rng(7).permutation(num_blocks).astype(np.int32)
        self.tables = order.reshape(self.num_sequences, width)
        heads = (num_blocks, shape.kv_heads)
        sizes = (shape.head_dim + shape.key_errors, shape.head_dim)
        self.words = [np.full((*heads, n * BLOCK), self.poison, np.float32) for n in sizes]
        drawn = np.random.default_rng(5).random((shape.kv_heads, shape.head_dim))
        self.key_dims = np.sort(np.argsort(drawn)[:, : shape.key_errors]).astype(np.int64)
        if shape.is_narrow:
            self.words = [(each.view(np.uint32) >> 16).astype(np.uint16) for each in self.words]
        frequency = 10000.0 ** (-np.arange(shape.head_dim // 2) / (shape.head_dim // 2))
        angles = np.outer(np.arange(width * BLOCK), frequency)
        self.angles = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.team = self.library.team_new(self.num_threads)
        assert self.team

    def close(self) -> None:
        self.library.team_end(c.c_void_p(self.team))

    def place(self, rows: Rows) -> None:
        """Into the blocks; q, k and v are afterwards what attention computes with."""
        self._call(rows, PLACE)

    def attend(self, rows: Rows) -> NDArray[np.float32]:
        """(M, Hq, Dh) of rows whose keys and values have been placed."""
        mixed = self._call(rows, ATTEND)
        assert mixed is not None
        return mixed

    def place_and_attend(self, rows: Rows) -> NDArray[np.float32] | None:
        """By the tiles themselves; None: they read each other's rows."""
        return self._call(rows, BOTH)

    def _call(self, rows: Rows, step: int) -> NDArray[np.float32] | None:
        shape = self.shape
        sizes = np.array(
            [
                *(shape.heads, shape.kv_heads, shape.head_dim, shape.is_narrow),
                *(len(rows.positions), self.tables.shape[1], shape.window, step),
                shape.key_errors,
            ],
            np.int64,
        )
        width = shape.heads * shape.head_dim
        mixed = np.zeros_like(rows.q)
        narrow = np.zeros((len(rows.q), -(-width // PAIRED_INPUTS) * PAIRED_INPUTS), np.uint16)
        arrays = (
            *(rows.positions, rows.sequence, self.tables, *self.angles),
            self.key_dims,
            *(rows.q, rows.k, rows.v, *self.words, mixed, narrow),
        )
        is_done = self.library.attention(
            c.c_void_p(self.team),
            c.c_void_p(sizes.ctypes.data),
            c.c_float(shape.cap),
            *(c.c_void_p(array.ctypes.data) for array in arrays),
        )
        assert not narrow[:, width:].any()
        if shape.is_narrow:
            rounded = narrow[:, :width].reshape(mixed.shape)
            assert np.array_equal(rounded.astype(np.uint32) << 16, mixed.view(np.uint32))
        return mixed if is_done else None


def exact(shape: Shape, rows: Rows) -> NDArray[np.float64]:
    """Attention of whole sequences in float64, written plainly."""
    out = np.zeros(rows.q.shape, np.float64)
    group = shape.heads // shape.kv_heads
    for sequence in np.unique(rows.sequence):
        own = rows.sequence == sequence
        q, k, v = (x[own].astype(np.float64) for x in (rows.q, rows.k, rows.v))
        k, v = (np.repeat(x, group, axis=1) for x in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(shape.head_dim)
        if shape.cap:
            scores = shape.cap * np.tanh(scores / shape.cap)
        places = np.arange(len(q))
        behind = places[:, None] - places[None]
        seen = (behind >= 0) & (behind < (shape.window or len(q)))
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[own] = np.einsum("hts,shd->thd", weights, v)
    return out
