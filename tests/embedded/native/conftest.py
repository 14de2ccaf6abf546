"""Threads for the kernels' tests."""

from collections.abc import Iterator

import pytest

from tinkercloud.embedded.native.team import Team


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    made = Team(2)
    yield made
    made.end()
