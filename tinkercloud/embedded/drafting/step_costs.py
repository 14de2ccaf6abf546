"""The time of a round of the target on this machine: measured once, then cached for the user.

`speculative.draft_length.costs` says which rounds are measured and how a table is fitted to them.
"""

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from tinkercloud.config import user_cache_dir
from tinkercloud.core.types import SamplingParams
from tinkercloud.decoding.sampler import Drawn, RowParams, sample, sample_candidates
from tinkercloud.embedded.forward.batch import Batch, SequenceRows, ragged
from tinkercloud.embedded.forward.kv_blocks import BLOCK_TOKENS, BlockPool, blocks_for
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.native.compiler import processor, source
from tinkercloud.speculative.draft_length.costs import PASSES, CostTable, measure_costs

logger = logging.getLogger(__name__)

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
SLOW_MS = 40.0  # of one row; where it takes longer, fewer sizes are measured, once each
SLOW_ROWS = (1, 2, 4, 8, 16, 32)
MAX_BLOCKS_SHARE = 0.5  # of the free ones
MEASURED = "with verdicts"  # what is measured: another word where that changes
PROBES = 6  # rounds of one row; the fastest decides whether rows are slow
BUSY = 2.0  # median over fastest round of one row, beyond which other processes disturb


def judge(drawn: Drawn, counts: Sequence[int]) -> None:
    """As after a round, of sequences with so many rows: how likely each drafted token was to be
    accepted."""
    tokens, first = drawn.tokens.tolist(), 0
    for count in counts:
        rows, first = range(first, first + count), first + count
        drafted = tokens[rows.start : rows.stop - 1]
        drawn.chances(rows, drafted)


class RoundTimer:
    """Times rounds of made-up tokens."""

    def __init__(self, base: BaseModel, runner: Runner, pool: BlockPool):
        self._base, self._runner, self._pool = base, runner, pool
        self._version = Version("round costs", base, base.weights, None, 1.0)

    @torch.inference_mode()
    def ms(self, rows: int, sequences: int, context: int) -> float:
        """Of `rows` rows of so many sequences, each with `context` tokens before them."""
        counts = np.full(sequences, rows // sequences)
        counts[: rows % sequences] += 1
        longest = int(counts.max())
        context = min(context, self._base.config.max_position_embeddings - longest)
        per_sequence = blocks_for(context + longest)
        fitting = int(self._pool.num_available * MAX_BLOCKS_SHARE) // per_sequence
        # Sequences share blocks where there are too few: what is in them costs the same time.
        blocks = self._pool.allocate(per_sequence * max(1, min(fitting, sequences)))
        if blocks is None:
            raise MemoryError("there are too few blocks of keys and values to measure rounds")
        try:
            tables = np.resize(blocks, (sequences, per_sequence)).tolist()
            params = [RowParams(SamplingParams(None, 0), 0, position) for position in range(rows)]
            batch = self._batch(counts.tolist(), tables, params)
            began = time.perf_counter()
            logits = self._runner.forward(batch, self._pool)
            if self._runner.candidates is not None:
                drawn = sample_candidates(self._runner.candidates, params, [-1] * rows)
            else:
                drawn = sample(logits, params, self._runner.scan)
            if rows > sequences:
                judge(drawn, counts.tolist())
            return 1e3 * (time.perf_counter() - began)
        finally:
            self._pool.free(blocks)

    def _batch(self, counts: list[int], tables: list[list[int]], params: list[RowParams]) -> Batch:
        vocab_size, fuses = self._base.config.vocab_size, self._runner.fuses_lm_head
        rows = iter(params)
        return ragged(
            [
                SequenceRows(
                    self._version,
                    [token % vocab_size for token in range(count)],
                    BLOCK_TOKENS * len(table) - max(counts),
                    table,
                    0 if fuses else count,
                    drawn_with=list(islice(rows, count)) if fuses else (),
                )
                for count, table in zip(counts, tables, strict=True)
            ]
        )


def round_costs(base: BaseModel, runner: Runner, pool: BlockPool, num_threads: int) -> CostTable:
    """From the cache, where a model of this shape was measured on such a machine; else measured,
    and cached unless other processes disturbed the measurement."""
    path = _path(base, num_threads)
    cached = _read(path)
    if cached is not None:
        return cached
    began = time.perf_counter()
    timer = RoundTimer(base, runner, pool)
    single_ms: list[float] = []  # of rounds of one row

    def ms(rows: int, sequences: int, context: int) -> float:
        took_ms = timer.ms(rows, sequences, context)
        if rows == 1:
            single_ms.append(took_ms)
        return took_ms

    slow = min(ms(1, 1, 64) for _ in range(PROBES)) > SLOW_MS
    rows, passes = (SLOW_ROWS, 1) if slow else (ROWS, PASSES)
    table = CostTable(measure_costs(ms, rows, passes))
    logger.info("measured the times of rounds in %.1f s", time.perf_counter() - began)
    if np.median(single_ms) > BUSY * min(single_ms):
        logger.warning("other processes disturbed the measurement; the next start repeats it")
    else:
        _write(path, table)
    return table


def _write(path: Path, costs: CostTable) -> None:
    scratch = path.with_suffix(f".{time.monotonic_ns()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(costs.to_json()), encoding="utf-8")
        scratch.replace(path)
    except OSError as error:  # the next start measures again
        logger.warning("the times of rounds cannot be cached: %s", error)


def _path(base: BaseModel, num_threads: int) -> Path:
    linears = sorted(base.config.linear_shapes().items())
    shape = (linears, str(base.dtype), num_threads, ROWS, PASSES, MEASURED)
    digest = hashlib.sha256(f"{shape}\n{processor()}\n{source()}".encode()).hexdigest()[:24]
    return user_cache_dir() / f"round-costs-{digest}.json"


def _read(path: Path) -> CostTable | None:
    try:
        return CostTable.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("%s cannot be read, rounds are measured again: %s", path, error)
        return None
