"""The C files beside this one, compiled for this machine and called with tensors.

The structures mirror those of forward.c and scan.c; train_kernels.py calls the others. Weights,
keys and values are float32, or all bfloat16; everything else is float32. Machines without a C
compiler and other devices take the path through torch (paged_context.py).
"""

import ctypes as c
import hashlib
import logging
import platform
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.architectures.config import ArchitectureConfig
from tinkercloud.config import c_compiler, user_cache_dir
from tinkercloud.decoding.sampler import RowParams, Scanned
from tinkercloud.weights.adapters import Adapter

logger = logging.getLogger(__name__)

SOURCES = sorted(Path(__file__).parent.glob("*.c"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC", "-pthread")
COMPILE_LIMIT_S = 120.0
KEPT_BYTES = 128 * 1024**2  # of logits, between passes
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class _Linear(c.Structure):
    _fields_ = (("weight", c.c_void_p), ("bias", c.c_void_p), ("out", c.c_int64), ("in", c.c_int64))


class _Layer(c.Structure):
    _fields_ = (
        *((name, c.c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        ("linear", _Linear * len(MODULES)),
        *((name, c.c_void_p) for name in ("keys", "values")),
    )


class _Model(c.Structure):
    _fields_ = (
        *(
            (name, c.c_int64)
            for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "vocab")
        ),
        ("block_size", c.c_int64),
        ("is_narrow", c.c_int64),
        ("eps", c.c_float),
        ("embed", c.c_void_p),
        ("final_norm", c.c_void_p),
        ("head", _Linear),
        ("layers", c.POINTER(_Layer)),
    )


class _Lora(c.Structure):
    _fields_ = (("a", c.c_void_p), ("b", c.c_void_p), ("rank", c.c_int64))


class _Segment(c.Structure):
    _fields_ = (
        ("first", c.c_int64),
        ("count", c.c_int64),
        ("scale", c.c_float),
        ("modules", c.POINTER(_Lora)),
    )


class _Batch(c.Structure):
    _fields_ = (
        ("rows", c.c_int64),
        *((name, c.c_void_p) for name in ("tokens", "positions", "sequence", "tables")),
        ("table_stride", c.c_int64),
        *((name, c.c_void_p) for name in ("cosine", "sine")),
        ("num_segments", c.c_int64),
        ("segments", c.POINTER(_Segment)),
        ("num_wanted", c.c_int64),
        ("wanted", c.c_void_p),
        ("num_captured", c.c_int64),
        *((name, c.c_void_p) for name in ("captured_layers", "captured", "hidden", "logits")),
    )


class _Draw(c.Structure):
    _fields_ = (
        ("temperature", c.c_float),
        ("top_k", c.c_int64),
        ("top_p", c.c_double),
        *((name, c.c_uint64) for name in ("seed", "sample", "position")),
    )


class _Scan(c.Structure):
    _fields_ = (
        ("logits", c.c_void_p),
        *((name, c.c_int64) for name in ("rows", "size", "limit")),
        ("draws", c.POINTER(_Draw)),
        *((name, c.c_void_p) for name in ("best", "norm", "count", "ids", "words")),
        ("next", c.c_long),
    )


@cache
def library() -> c.CDLL | None:
    """None where there is no C compiler, or it fails; the reason is logged once."""
    try:
        path = _compiled()
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "sampling without the compiled forward pass, at a part of its speed: %s", error
        )
        return None
    loaded = c.CDLL(str(path))
    loaded.team_new.restype = c.c_void_p
    loaded.team_new.argtypes = (c.c_int,)
    loaded.team_end.argtypes = (c.c_void_p,)
    loaded.forward.argtypes = (c.c_void_p, c.POINTER(_Model), c.POINTER(_Batch))
    loaded.scan.argtypes = (c.c_void_p, c.POINTER(_Scan))
    return loaded


def _compiled() -> Path:
    """The shared library of this source, these flags and this processor; compiled where missing."""
    compiler = c_compiler()
    if compiler is None:
        raise FileNotFoundError("there is no C compiler (install gcc or clang, or set CC)")
    what = "\n".join((source(), compiler, *FLAGS, processor()))
    name = f"kernels-{hashlib.sha256(what.encode()).hexdigest()[:24]}.so"
    folder = user_cache_dir()
    if (folder / name).exists():
        return folder / name
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / name
        command = [compiler, *FLAGS, "-o", str(made), *map(str, SOURCES), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S)
        if done.returncode:
            raise OSError(f"{compiler} failed: {done.stderr.strip()[-500:]}")
        made.replace(folder / name)  # at once, whoever else compiles it too
    return folder / name


@cache
def source() -> str:
    """What is compiled; the speed of a pass depends on it, too."""
    return "\n".join(path.read_text() for path in (*SOURCES, *HEADERS))


def processor() -> str:
    """What -march=native depends on, and with it what a pass takes."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({one for one in lines if one.startswith(("model name", "flags"))}))


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
    def wanted(self) -> NDArray[np.int64]: ...


class Team:
    """Threads that compute together; ended with the process."""

    def __init__(self, num_threads: int):
        loaded = library()
        assert loaded is not None, "asked for only where there is a library"
        self.library = loaded
        self.handle = loaded.team_new(num_threads)
        if not self.handle:
            raise OSError(f"cannot start {num_threads} threads")

    def end(self) -> None:
        handle, self.handle = self.handle, None
        if handle:
            self.library.team_end(handle)


CANDIDATES = 1024  # of one row; with more, the row is drawn the plain way


def scan(team: Team, logits: Tensor, rows: Sequence[RowParams]) -> Scanned:
    """logits float32 (B, V). See `Scanned`."""
    num, size = logits.shape
    draws = (_Draw * num)(
        *[
            (p.temperature, p.top_k, p.top_p, p.seed, row.sample_index, row.position)
            for row in rows
            for p in (row.params,)
        ]
    )
    best, count = np.empty(num, np.int64), np.empty(num, np.int64)
    norm = np.empty(num, np.float64)
    ids, words = np.empty((num, CANDIDATES), np.int64), np.empty((num, CANDIDATES), np.uint32)
    out = (array.ctypes.data for array in (best, norm, count, ids, words))
    asked = _Scan(_address(logits), num, size, CANDIDATES, draws, *out, 0)
    if team.library.scan(team.handle, c.byref(asked)):
        raise MemoryError(f"no memory for {num} rows of {size} logits")
    return Scanned(best, norm, count, ids, words)


class AdapterTable:
    """The low-rank factors of one published adapter, for forward.c."""

    def __init__(self, adapter: Adapter, num_layers: int):
        names = [*_module_names(num_layers), "lm_head"]
        self.entries = (_Lora * len(names))()
        for entry, name in zip(self.entries, names, strict=True):
            if name in adapter:
                a, b = adapter[name]
                entry.a, entry.b, entry.rank = _address(a), _address(b), a.shape[0]
        self._kept = adapter


def _module_names(num_layers: int) -> list[str]:
    return [
        f"model.layers.{layer}.{'self_attn' if leaf[0] in 'qkvo' else 'mlp'}.{leaf}"
        for layer in range(num_layers)
        for leaf in MODULES
    ]


class NativeModel:
    """One set of weights with the pool its keys and values lie in.

    keys (blocks, Hkv, Dh, block size) and values (blocks, Hkv, block size, Dh): in the weights'
    number type, by layer.
    """

    def __init__(
        self,
        config: ArchitectureConfig,
        weights: Mapping[str, Tensor],
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ):
        self._config = config
        self._logits = torch.empty(
            0, config.vocab_size
        )  # fresh memory would be cleared page by page
        dtype = weights["model.embed_tokens"].dtype
        vectors = {n: w.float() for n, w in weights.items() if w.dim() == 1}  # norms and biases
        self._kept = (dict(weights), vectors, list(keys), list(values))
        self._layers = (_Layer * config.num_layers)()
        names = iter(_module_names(config.num_layers))

        def linear(name: str) -> _Linear:
            weight = weights[name]
            bias = vectors.get(f"{name}.bias")
            return _Linear(_address(weight, dtype), _address(bias), *weight.shape)

        for i, layer in enumerate(self._layers):
            path = f"model.layers.{i}"
            layer.input_norm = _address(vectors[f"{path}.input_layernorm"])
            layer.post_norm = _address(vectors[f"{path}.post_attention_layernorm"])
            layer.q_norm = _address(vectors.get(f"{path}.self_attn.q_norm"))
            layer.k_norm = _address(vectors.get(f"{path}.self_attn.k_norm"))
            for j in range(len(MODULES)):
                layer.linear[j] = linear(next(names))
            layer.keys, layer.values = _address(keys[i], dtype), _address(values[i], dtype)
        self._model = _Model(
            config.num_layers,
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            self._layers[0].linear[MODULES.index("gate_proj")].out,
            config.vocab_size,
            keys[0].shape[3],
            dtype == torch.bfloat16,
            config.rms_norm_eps,
            _address(weights["model.embed_tokens"], dtype),
            _address(vectors["model.norm"]),
            linear("lm_head"),
            self._layers,
        )

    def forward(
        self,
        team: Team,
        rows: Rows,
        rotary: tuple[Tensor, Tensor],
        segments: Sequence[tuple[int, int, float, AdapterTable]],
        layers: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor]:
        """Logits (W, V) of the wanted rows, good until the next call, and what `layers` put out
        (M, L, D), 1 being the first and the last one's after the final norm; keys and values of all
        rows go to their blocks.

        rotary: cosines and sines of all positions up to the last (P, Dh / 2). segments: (first
        row, number of rows, scale, factors), disjoint.
        """
        hidden = torch.empty(len(rows.tokens), self._config.hidden_size)
        logits = self._logits_of(len(rows.wanted))
        captured = torch.empty(len(rows.tokens), len(layers), self._config.hidden_size)
        numbers = np.array(layers, np.int64)
        given = (rows.tokens, rows.positions, rows.sequence, rows.tables, rows.wanted)
        arrays = [np.ascontiguousarray(one) for one in given]
        tokens, positions, sequence, tables, wanted = (one.ctypes.data for one in arrays)
        entries = (_Segment * len(segments))(*[(f, n, s, t.entries) for f, n, s, t in segments])
        angles = [one.contiguous() for one in rotary]
        batch = _Batch(
            *(len(rows.tokens), tokens, positions, sequence, tables, rows.tables.shape[1]),
            *(_address(one) for one in angles),
            *(len(segments), entries, len(rows.wanted), wanted),
            *(len(layers), numbers.ctypes.data, _address(captured)),
            *(_address(hidden), _address(logits)),
        )
        if team.library.forward(team.handle, c.byref(self._model), c.byref(batch)):
            raise MemoryError(f"no memory for a batch of {len(rows.tokens)} rows")
        return logits, captured

    def _logits_of(self, num_rows: int) -> Tensor:
        """Memory for them. What is kept for the next pass is bounded."""
        if num_rows <= len(self._logits):
            return self._logits[:num_rows]
        logits = torch.empty(num_rows, self._config.vocab_size)
        if logits.nbytes <= KEPT_BYTES:
            self._logits = logits
        return logits
