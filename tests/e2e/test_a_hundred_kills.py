"""A hundred kills from a seeded schedule (`python -m tests.e2e.kills`), and every number and
checkpoint of the runs as without them."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.e2e.killer import PARTS as MOMENTS
from tests.e2e.kills import Part, disturbed, loop_of, parts, sdk_named, served, undisturbed
from tests.e2e.training_loops import LoopName, Seen
from tinkercloud.embedded.native.compiler import library

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(library() is None, reason="there is no C compiler here"),
    pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="the engine is found in /proc"),
]

SEED, NUM_KILLS = 1, 100
PARTS = parts(SEED, NUM_KILLS)


@pytest.fixture(scope="module")
def expected(
    smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[LoopName], Seen]:
    """What an undisturbed run sees, by the name of its loop."""

    @cache
    def run(name: LoopName) -> Seen:
        with served(smollm2_gguf, tmp_path_factory.mktemp(name) / "data") as server:
            return undisturbed(server, loop_of(name, PARTS))

    return run


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_run_over_many_kills_is_the_run_without_them(
    part: Part, smollm2_gguf: Path, tmp_path: Path, expected: Callable[[LoopName], Seen]
) -> None:
    with served(smollm2_gguf, tmp_path / "data") as server:
        result = disturbed(
            sdk_named(part.sdk), server, loop_of(part.loop, PARTS), part.kills, expected(part.loop)
        )
    assert len(result.killed) == len(part.kills)
    assert result.differences == []


def test_the_schedule_has_a_hundred_kills_at_every_moment() -> None:
    kills = [kill for part in PARTS for kill in part.kills]
    assert len(kills) == NUM_KILLS
    assert {kill.moment for kill in kills} == {moment for moment, _ in MOMENTS}
    assert {kill.target for kill in kills} == {"server", "engine"}
