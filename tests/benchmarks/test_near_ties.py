"""Which differences between greedy texts of a server that rounds are ties."""

import pytest

from benchmarks.lib.near_ties import gap_where_it_parts, largest_change

TOKENS = ["3", "2", "\n"]
TOPS = [{"3": -0.3, "4": -2.3}, {"2": -0.9, "0": -1.1}, {"\n": -0.1, ",": -3.1}]


@pytest.mark.parametrize(
    ("text", "gap"), [("30\n", 0.2), ("42", 2.0), ("32,", 3.0), ("32\nand more", float("inf"))]
)
def test_the_gap_is_that_of_the_first_place_that_differs(text: str, gap: float) -> None:
    assert gap_where_it_parts(TOKENS, TOPS, text) == pytest.approx(gap)


def test_the_change_is_the_largest_of_all_places() -> None:
    as_prompt = [{"3": -0.3, "4": -2.2}, {"2": -1.0, "0": -1.0}, {"\n": -0.1, "x": -3.1}]
    assert largest_change(TOPS, as_prompt) == pytest.approx(0.2)
