"""What a round of the target takes on this machine: measured once, then kept in the user's cache.

`speculative.draft_length.costs` says which rounds are measured and what is made of the times.
"""

import hashlib
import json
import logging
import time
from pathlib import Path

import numpy as np
import torch

from tinkercloud.config import user_cache_dir
from tinkercloud.core.types import SamplingParams
from tinkercloud.decoding.sampler import RowParams, sample
from tinkercloud.embedded.forward.batch import Batch, Part, ragged
from tinkercloud.embedded.forward.kv_blocks import BLOCK_TOKENS, BlockPool, blocks_for
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.native.bindings import processor, source
from tinkercloud.speculative.draft_length.costs import QUICK_REPEATS, CostTable, measure_costs

logger = logging.getLogger(__name__)

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
SLOW_MS = 40.0  # of one row; where it takes longer fewer points are measured, once each
SLOW_ROWS = (1, 2, 4, 8, 16, 32)
PASSES = 3  # of which the median counts: a slow moment of the machine is no cost of a round
MOST_BLOCKS = 0.5  # of those that are free
PROBES = 6  # rounds of one row; the best of them says whether rows are slow
BUSY = 2.0  # times the best round of one row that the typical one takes where others compute too


class Rounds:
    """Rounds of no sample, to be timed."""

    def __init__(self, base: BaseModel, runner: Runner, pool: BlockPool):
        self._base, self._runner, self._pool = base, runner, pool
        self._version = Version("round costs", base, base.weights, None, 1.0)

    @torch.inference_mode()
    def ms(self, rows: int, sequences: int, context: int) -> float:
        """`rows` of that many sequences, each with so many tokens before them."""
        counts = np.full(sequences, rows // sequences)
        counts[: rows % sequences] += 1
        each = blocks_for(min(context, self._longest(int(counts.max()))) + int(counts.max()))
        room = int(self._pool.num_available * MOST_BLOCKS) // each
        blocks = self._pool.allocate(each * max(1, min(room, sequences)))
        if blocks is None:
            raise MemoryError("there are too few blocks of keys and values to measure rounds")
        try:
            batch = self._batch(counts.tolist(), np.resize(blocks, (sequences, each)).tolist())
            began = time.perf_counter()
            logits = self._runner.forward(batch, self._pool)
            params = [RowParams(SamplingParams(None, 0), 0, position) for position in range(rows)]
            sample(logits, params, self._runner.scan)
            return 1e3 * (time.perf_counter() - began)
        finally:
            self._pool.free(blocks)

    def _longest(self, rows: int) -> int:
        return self._base.config.max_position_embeddings - rows

    def _batch(self, counts: list[int], tables: list[list[int]]) -> Batch:
        vocab_size = self._base.config.vocab_size
        return ragged(
            [
                Part(
                    self._version,
                    [token % vocab_size for token in range(count)],
                    BLOCK_TOKENS * len(table) - max(counts),
                    table,
                    count,
                )
                for count, table in zip(counts, tables, strict=True)
            ]
        )


def round_costs(base: BaseModel, runner: Runner, pool: BlockPool, num_threads: int) -> CostTable:
    """From the cache, where a model of this shape was measured on such a machine.

    Kept there unless other work on the machine disturbed the measurement.
    """
    path = _path(base, num_threads)
    known = _read(path)
    if known is not None:
        return known
    began = time.perf_counter()
    rounds = Rounds(base, runner, pool)
    of_one: list[float] = []

    def ms(rows: int, sequences: int, context: int) -> float:
        took = rounds.ms(rows, sequences, context)
        if rows == 1:
            of_one.append(took)
        return took

    slow = min(ms(1, 1, 64) for _ in range(PROBES)) > SLOW_MS
    rows, repeats = (SLOW_ROWS, 1) if slow else (ROWS, QUICK_REPEATS)
    passes = 1 if slow else PASSES
    found = CostTable(measure_costs(ms, rows, num_passes=passes, quick_repeats=repeats))
    logger.info("measured what rounds cost in %.1f s", time.perf_counter() - began)
    if np.median(of_one) > BUSY * min(of_one):
        logger.warning("other work disturbed this; what rounds cost is measured at the next start")
    else:
        _write(path, found)
    return found


def _write(path: Path, costs: CostTable) -> None:
    scratch = path.with_suffix(f".{time.monotonic_ns()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(costs.to_json()), encoding="utf-8")
        scratch.replace(path)
    except OSError as error:  # measured again at the next start, then
        logger.warning("cannot keep what rounds cost: %s", error)


def _path(base: BaseModel, num_threads: int) -> Path:
    linears = sorted(base.config.linear_shapes().items())
    shape = (linears, str(base.dtype), num_threads, ROWS, PASSES)
    told = hashlib.sha256(f"{shape}\n{processor()}\n{source()}".encode()).hexdigest()[:24]
    return user_cache_dir() / f"round-costs-{told}.json"


def _read(path: Path) -> CostTable | None:
    try:
        return CostTable.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("%s is measured anew: %s", path, error)
        return None
