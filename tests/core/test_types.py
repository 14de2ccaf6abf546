"""What sequences begin with alike."""

from collections.abc import Sequence

import pytest

from tinkercloud.core.types import num_equal


@pytest.mark.parametrize(
    ("first", "second", "num"),
    [
        ([], [], 0),
        ([1, 2], [], 0),
        ([0, 1], [1, 0], 0),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], (1, 2, 3), 2),
        ([1, 2, 3, 4], [1, 2, 5, 4], 2),
    ],
)
def test_what_is_alike_is_counted_up_to_the_first_that_differs(
    first: Sequence[int], second: Sequence[int], num: int
) -> None:
    assert num_equal(first, second) == num_equal(second, first) == num
