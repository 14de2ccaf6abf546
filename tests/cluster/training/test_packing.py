"""Packing by arithmetic alone: no datum is lost, and every rank does equally much."""

import numpy as np
import pytest

from tinkercloud.cluster.training import packing
from tinkercloud.core.types import Datum
from tinkercloud.errors import UserError
from tinkercloud.planning.plan import Layout

LENGTHS = [5, 1, 17, 2, 40, 8, 3]


def layout(tp: int = 1, cp: int = 1, dp: int = 1, tokens: int = 64) -> Layout:
    return Layout(tp, 1, cp, 1, 1, dp, tp > 1, "none", tokens)


def datum(length: int, first: int = 0, num_targets: int | None = None) -> Datum:
    tokens = np.arange(first, first + length, dtype=np.int32)
    ids = tokens.astype(np.int64) + 1
    if num_targets is not None:
        ids = ids[:, None] + np.arange(num_targets)
    return Datum(tokens, {"target_tokens": ids})


DATA = [datum(n, 100 * i) for i, n in enumerate(LENGTHS)]


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("dp", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 7])
def test_every_datum_is_in_exactly_one_micro_batch(cp: int, dp: int, count: int) -> None:
    planned = packing.plan_micro_batches(DATA[:count], layout(2, cp, dp))
    found = [i for own in planned for batch in own for i in batch.indices]
    assert sorted(found) == list(range(count))
    assert len({len(own) for own in planned}) == 1
    for batch in (batch for own in planned for batch in own):
        assert all(length % packing.alignment(layout(2, cp, dp)) == 0 for length in batch.lengths)
        assert batch.num_rows <= 64
        assert batch.num_rows > 0


def test_ranks_without_datums_get_empty_micro_batches() -> None:
    planned = packing.plan_micro_batches(DATA[:1], layout(dp=2))
    assert planned == [
        [packing.MicroBatch((0,), (5,))],
        [packing.MicroBatch((), (1,))],
    ]


def test_ranks_get_nearly_the_same_number_of_rows() -> None:
    owned = packing.distribute([100, 90, 50, 40, 10], 2)
    assert owned == [[0, 3, 4], [1, 2]]


def test_a_micro_batch_ends_before_it_overflows() -> None:
    planned = packing.plan_micro_batches(DATA, layout(tokens=44))
    assert [batch.indices for batch in planned[0]] == [(0, 1, 2, 3), (4,), (5, 6)]


def test_a_sequence_longer_than_a_micro_batch_is_refused() -> None:
    packing.check_lengths(DATA, layout(tokens=40))
    with pytest.raises(UserError, match="datum 4 has 40 tokens"):
        packing.check_lengths(DATA, layout(tokens=39))


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_zigzag_gives_every_row_to_exactly_one_rank(cp: int) -> None:
    lengths = [6 * cp, 2 * cp, 10 * cp]
    parts = [packing.zigzag(lengths, cp, rank) for rank in range(cp)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(18 * cp))
    assert len({len(part) for part in parts}) == 1


def test_zigzag_gives_a_rank_an_early_and_a_late_piece_of_each_sequence() -> None:
    assert packing.zigzag([8, 4], 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert packing.zigzag([8, 4], 2, 1).tolist() == [2, 3, 4, 5, 9, 10]


def test_rows_hold_the_tokens_their_positions_and_padding_at_the_end() -> None:
    batch = packing.MicroBatch((1, 0), (2, 8))
    full = packing.rows(batch, DATA, 1, 0)
    assert full.tokens.tolist() == [100, 0, 0, 1, 2, 3, 4, 0, 0, 0]
    assert full.positions.tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 6, 7]
    assert batch.boundaries.tolist() == [0, 2, 10]


def test_context_parallel_ranks_hold_the_rows_of_their_pieces() -> None:
    batch = packing.MicroBatch((2,), (20,))
    full = packing.rows(batch, DATA, 1, 0)
    for rank in range(2):
        own, cut = packing.rows(batch, DATA, 2, rank), packing.zigzag(batch.lengths, 2, rank)
        assert own.tokens.tolist() == full.tokens[cut].tolist()
        assert own.positions.tolist() == cut.tolist()


def test_targets_are_as_wide_as_the_widest_datum() -> None:
    data = [datum(3), datum(2, 10, num_targets=3)]
    packed = packing.targets(packing.MicroBatch((0, 1), (4, 2)), data)
    assert packed.tolist() == [
        [1, 0, 0],
        [2, 0, 0],
        [3, 0, 0],
        [0, 0, 0],
        [11, 12, 13],
        [12, 13, 14],
    ]


def test_an_empty_micro_batch_has_one_padded_sequence_without_targets() -> None:
    batch = packing.MicroBatch((), (4,))
    assert packing.rows(batch, DATA, 1, 0).tokens.tolist() == [0, 0, 0, 0]
    assert packing.targets(batch, DATA).tolist() == [[0], [0], [0], [0]]
