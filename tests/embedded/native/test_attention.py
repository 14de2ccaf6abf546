"""The compiled attention: right, and a row's bits are its own sequence's."""

import ctypes as c
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.embedded.native.attention_calls import (
    BLOCK,
    Attention,
    Rows,
    Shape,
    compiled,
    exact,
    variants,
)
from tinkercloud.config import c_compiler

# Groups of 1, 3, 7 and more heads than a tile has queries; head sizes that fill vectors and not.
SIZES = [(9, 3, 64), (4, 4, 24), (7, 1, 80), (6, 2, 96), (2, 1, 128), (32, 1, 8), (4, 2, 6)]
LENGTHS = [150, 1, 64, 17, 128]
LARGE = 3e38  # finite, also as bfloat16

Make = Callable[..., Attention]


@pytest.fixture(params=list(variants()), scope="module")
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> c.CDLL:
    if c_compiler() is None:
        pytest.skip("there is no C compiler here")
    return compiled(tmp_path_factory.mktemp("attention"), variants()[request.param])


@pytest.fixture
def make(library: c.CDLL) -> Iterator[Make]:
    attentions: list[Attention] = []

    def new(shape: Shape, lengths: list[int], **changes: float) -> Attention:
        attention = Attention(library, shape, len(lengths), max(lengths), **changes)
        attentions.append(attention)
        return attention

    yield new
    for attention in attentions:
        attention.close()


@pytest.fixture(params=(False, True), ids=("float32", "bfloat16"))
def is_narrow(request: pytest.FixtureRequest) -> bool:
    return request.param


def assert_near(shape: Shape, found: NDArray[np.float32], rows: Rows) -> None:
    """Up to rounding: in bfloat16 probabilities and results have 8 bits."""
    limit = 2.0**-7 if shape.is_narrow else 4e-6
    error = np.abs(found - exact(shape, rows)).max()
    assert error <= limit * np.abs(rows.v).max()


def assert_each_row_is_its_own(attention: Attention, rows: Rows, whole: NDArray) -> None:
    """Alone, in tiles of all sizes, in pieces, and beside others."""
    num_rows = len(rows.positions)
    for row in range(0, num_rows, 3):
        alone = attention.attend(rows[row : row + 1])
        assert np.array_equal(alone[0], whole[row]), f"row {row} alone"
    for size in range(2, 30):
        first = 60 - size // 2  # over the end of a unit
        some = attention.attend(rows[first : first + size])
        assert np.array_equal(some, whole[first : first + size]), f"{size} rows"
    chosen = np.flatnonzero(np.random.default_rng(3).random(num_rows) < 0.4).tolist()
    assert np.array_equal(attention.attend(rows[chosen]), whole[chosen]), "beside others"


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_attention_is_that_of_float64_and_a_rows_bits_are_its_own(
    make: Make, size: tuple[int, int, int], is_narrow: bool
) -> None:
    shape = Shape(*size, is_narrow)
    rows, attention = Rows.random(shape, LENGTHS), make(shape, LENGTHS)
    attention.place(rows)
    whole = attention.attend(rows)
    assert_near(shape, whole, rows)
    assert_each_row_is_its_own(attention, rows, whole)


@pytest.mark.parametrize("window", [1, 5, 64, 100])
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_windows_and_caps_are_those_of_float64(
    make: Make, window: int, cap: float, is_narrow: bool
) -> None:
    shape = Shape(6, 2, 16, is_narrow, window, cap)
    rows, attention = Rows.random(shape, LENGTHS, size=2.0), make(shape, LENGTHS)
    attention.place(rows)
    whole = attention.attend(rows)
    assert_near(shape, whole, rows)
    assert_each_row_is_its_own(attention, rows, whole)


def test_a_cap_is_felt_by_large_scores_only(make: Make) -> None:
    """Scores of some hundreds, where tanh is 1, and of less than 1, where it is its argument."""
    for size in (10.0, 0.1):
        shape = Shape(4, 1, 32, False, 0, 30.0)
        rows, attention = Rows.random(shape, [130], size=size), make(shape, [130])
        attention.place(rows)
        assert_near(shape, attention.attend(rows), rows)


@pytest.mark.parametrize("poison", [LARGE, -LARGE, np.nan])
def test_what_lies_in_slots_that_are_not_written_is_never_felt(
    make: Make, poison: float, is_narrow: bool
) -> None:
    """Every row attends when it is the last that has been written."""
    shape = Shape(6, 2, 24, is_narrow)
    rows = Rows.random(shape, [150])
    clean, soiled = make(shape, [150]), make(shape, [150], poison=poison)
    first, random = 0, np.random.default_rng(1)
    while first < 150:
        end = min(150, first + int(random.integers(1, 12)))
        pieces = []
        for attention in (clean, soiled):
            piece = rows[first:end]
            attention.place(piece)
            pieces.append(attention.attend(piece))
        assert np.isfinite(pieces[0]).all()
        assert np.array_equal(*pieces), (first, end)
        first = end


def test_a_prompt_in_pieces_has_the_bits_of_the_whole(make: Make, is_narrow: bool) -> None:
    shape = Shape(6, 3, 32, is_narrow)
    rows = Rows.random(shape, LENGTHS)
    attention = make(shape, LENGTHS)
    whole_rows = rows[:]
    attention.place(whole_rows)
    whole = attention.attend(whole_rows)
    for seed in range(3):
        pieces, random = make(shape, LENGTHS), np.random.default_rng(seed)
        num_done = np.zeros(len(LENGTHS), int)
        while (num_done < LENGTHS).any():
            ends = np.minimum(num_done + random.integers(0, 40, len(LENGTHS)), LENGTHS)
            spans = zip(num_done, ends, range(len(LENGTHS)), strict=True)
            starts = np.cumsum([0, *LENGTHS])
            chosen = [int(starts[s] + i) for a, b, s in spans for i in range(a, b)]
            num_done = ends
            if chosen:
                piece = rows[chosen]
                pieces.place(piece)
                assert np.array_equal(pieces.attend(piece), whole[chosen])


def test_tiles_that_are_alone_place_their_own_rows(make: Make, is_narrow: bool) -> None:
    """Up to eight rows of each sequence, as samples with drafts have them."""
    shape = Shape(6, 2, 32, is_narrow)
    rows = Rows.random(shape, LENGTHS)
    apart, together = (make(shape, LENGTHS, num_threads=n) for n in (1, 3))
    starts = np.cumsum([0, *LENGTHS]).tolist()
    spans = [range(start, start + num) for start, num in zip(starts, LENGTHS, strict=False)]
    for attention in (apart, together):
        attention.place(rows[[row for span in spans for row in span[:-8]]])
    last = [row for span in spans for row in span[-8:]]
    placed = rows[last]
    apart.place(placed)
    found = together.place_and_attend(rows[last])
    assert found is not None
    assert np.array_equal(found, apart.attend(placed))
    for one, other in zip(apart.words, together.words, strict=True):
        assert np.array_equal(one, other)


def test_tiles_are_not_alone_where_one_reads_what_another_places(make: Make) -> None:
    shape = Shape(4, 4, 16, False)
    attention = make(shape, [40, 40])
    rows = Rows.random(shape, [40, 40])
    assert attention.place_and_attend(rows[:40]) is None, "a sequence of two tiles"
    first, own, behind = range(BLOCK), [40], [40 + BLOCK]
    attention.place(rows[40:80])
    assert attention.place_and_attend(rows[[*first, *behind]]) is not None
    attention.tables[1, 0] = attention.tables[0, 0]
    assert attention.place_and_attend(rows[[*first, *behind]]) is None, "a shared block"
    attention.tables[1, 0] = attention.tables[0, 1]
    assert attention.place_and_attend(rows[[*first, *own]]) is not None


def test_results_do_not_depend_on_the_number_of_threads(make: Make, is_narrow: bool) -> None:
    shape = Shape(6, 3, 32, is_narrow)
    results = []
    for num_threads in (1, 2, 5):
        rows = Rows.random(shape, LENGTHS)
        attention = make(shape, LENGTHS, num_threads=num_threads)
        attention.place(rows)
        results.append(attention.attend(rows))
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


def test_a_probability_of_one_is_one(make: Make, is_narrow: bool) -> None:
    """exp(0) is 1 to the bit: a row that sees one position has its values."""
    shape = Shape(4, 2, 24, is_narrow, 1)
    rows, attention = Rows.random(shape, [70]), make(shape, [70])
    attention.place(rows)
    assert np.array_equal(attention.attend(rows), np.repeat(rows.v, 2, axis=1))


def test_keys_and_values_lie_in_blocks_as_the_pool_says(make: Make, is_narrow: bool) -> None:
    shape, length = Shape(2, 2, 8, is_narrow), 40
    rows, attention = Rows.random(shape, [length]), make(shape, [length])
    exact_rows = rows[:]
    make(Shape(2, 2, 8, False), [length]).place(exact_rows)
    attention.place(rows)
    keys, values = attention.words
    if is_narrow:
        keys = keys.reshape(-1, 2, 8, BLOCK, 2).swapaxes(3, 4).reshape(-1, 2, 16, BLOCK)
        keys, errors = keys[:, :, :8], keys[:, :, 8:].transpose(0, 3, 1, 2)[attention.tables[0]]
        assert_holds(errors, rounded((exact_rows.k - rows.k)[:, [[0], [1]], attention.key_dims]))
        values = values.reshape(-1, 2, BLOCK // 2, 8, 2).swapaxes(3, 4)
    by_token = keys.reshape(-1, 2, 8, BLOCK).transpose(0, 3, 1, 2)[attention.tables[0]]
    assert_holds(by_token, rows.k)
    by_token = values.reshape(-1, 2, BLOCK, 8).transpose(0, 2, 1, 3)[attention.tables[0]]
    assert_holds(by_token, rows.v)


def rounded(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """To bfloat16."""
    return torch.from_numpy(x).bfloat16().float().numpy()


def assert_holds(by_token: NDArray, expected: NDArray[np.float32]) -> None:
    """(blocks, tokens, heads, Dh) holds (M, heads, Dh)."""
    held = by_token.reshape(-1, *expected.shape[1:])[: len(expected)]
    if held.dtype == np.uint16:
        held = (held.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(held, expected)


def test_positions_turn_queries_and_keys(make: Make, is_narrow: bool) -> None:
    shape = Shape(2, 2, 8, is_narrow)
    rows, attention = Rows.random(shape, [40]), make(shape, [40])
    before = rows[:]
    attention.place(rows)
    cosine, sine = (angle[:40, None].astype(np.float64) for angle in attention.angles)
    for found, raw in ((rows.q, before.q), (rows.k, before.k)):
        first, second = raw[..., :4], raw[..., 4:]
        turned = (first * cosine - second * sine, second * cosine + first * sine)
        expected = np.concatenate(turned, axis=-1)
        limit = 2.0**-8 if is_narrow else 1e-6
        np.testing.assert_allclose(found, expected, rtol=0, atol=limit * np.abs(expected).max())


def test_with_errors_of_its_keys_attention_is_nearer_to_keys_that_are_not_rounded(
    make: Make,
) -> None:
    """Large ones, so that their rounding is most of what is wrong."""
    drawn, distances = Rows.random(Shape(6, 2, 32, True), [100], size=4.0), []
    rotated = drawn[:]
    make(Shape(6, 2, 32, False), [100]).place(rotated)
    right = exact(Shape(6, 2, 32, False), rotated)
    for count in (0, 16, 32):
        shape, rows = Shape(6, 2, 32, True, num_key_errors=count), drawn[:]
        attention = make(shape, [100])
        attention.place(rows)
        distances.append(float(np.square(attention.attend(rows) - right).mean()))
    assert distances[1] < 0.8 * distances[0], distances
    assert distances[2] < 0.3 * distances[0], distances
