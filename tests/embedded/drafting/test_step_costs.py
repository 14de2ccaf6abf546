"""What rounds cost on this machine: measured, kept, and never in the way."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.embedded.tiny import open_store
from tinkercloud.decoding.sampler import Drawn
from tinkercloud.embedded.drafting import step_costs as module
from tinkercloud.embedded.drafting.step_costs import PROBES, RoundTimer, round_costs
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import NativeRunner, library
from tinkercloud.embedded.model.base_model import BaseModel

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler here")


@pytest.fixture
def base(folder: Path) -> BaseModel:
    return open_store(folder).base("tiny")


def pool_of(base: BaseModel, num_blocks: int) -> BlockPool:
    return BlockPool(base.config, base.dtype, base.device, num_blocks)


def test_times_are_measured_once_and_read_from_then_on(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "user_cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(module, "BUSY", np.inf)  # rounds of so small a model are
    pool, runner = pool_of(base, 300), NativeRunner(1)
    first = round_costs(base, runner, pool, 1)
    assert pool.num_available == pool.num_blocks
    assert first.plain_ms(1, 64) > 0
    rows = np.array([128.0])
    assert first.verify_ms(rows, 32, 64)[0] >= first.plain_ms(32, 64)
    monkeypatch.setattr(RoundTimer, "ms", lambda *_: pytest.fail("measured again"))
    assert round_costs(base, runner, pool, 1).to_json() == first.to_json()


def test_a_round_that_verifies_is_timed_with_the_verdicts_on_its_drafts(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[tuple[list[int], int]] = []
    chances = Drawn.chances

    def counted(drawn: Drawn, rows: Sequence[int], tokens: Sequence[int]) -> tuple[float, ...]:
        found = chances(drawn, rows, tokens)
        assert all(0.0 < chance <= 1.0 for chance in found)
        judged.append((list(rows), len(found)))
        return found

    monkeypatch.setattr(Drawn, "chances", counted)
    timer = RoundTimer(base, NativeRunner(1), pool_of(base, 300))
    timer.ms(3, 3, 8)
    assert not judged
    timer.ms(5, 2, 8)
    assert judged == [([0, 1, 2], 2), ([3, 4], 1)]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [1]}'])
def test_a_damaged_file_is_measured_again(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(module, "user_cache_dir", lambda: tmp_path)
    monkeypatch.setattr(module, "ROWS", (1, 2, 4))
    monkeypatch.setattr(module, "BUSY", np.inf)
    round_costs(base, NativeRunner(1), pool_of(base, 300), 1)
    (path,) = tmp_path.glob("round-costs-*")
    path.write_text(text)
    assert round_costs(base, NativeRunner(1), pool_of(base, 300), 1).plain_ms(1, 64) > 0


def test_where_nothing_can_be_written_times_are_measured_at_each_start(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(module, "user_cache_dir", lambda: tmp_path / "file" / "cache")
    monkeypatch.setattr(module, "ROWS", (1, 2, 4))
    assert round_costs(base, NativeRunner(1), pool_of(base, 300), 1).plain_ms(1, 64) > 0


def test_few_blocks_are_enough(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one sequence's context: rows then share blocks."""
    monkeypatch.setattr(module, "user_cache_dir", lambda: tmp_path)
    pool = pool_of(base, 65)
    assert round_costs(base, NativeRunner(1), pool, 1).plain_ms(128, 64) > 0
    assert pool.num_available == 65


def test_a_disturbed_measurement_is_not_cached(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third round is undisturbed."""
    monkeypatch.setattr(module, "user_cache_dir", lambda: tmp_path)
    monkeypatch.setattr(module, "ROWS", (1, 2, 4))
    turns = itertools.cycle((10.0, 40.0, 40.0))
    monkeypatch.setattr(RoundTimer, "ms", lambda _, rows, *__: rows * next(turns))
    round_costs(base, NativeRunner(1), pool_of(base, 300), 1)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(RoundTimer, "ms", lambda _, rows, *__: 10.0 * rows)
    round_costs(base, NativeRunner(1), pool_of(base, 300), 1)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_busy_moment_does_not_make_a_machine_slow(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "user_cache_dir", lambda: tmp_path)
    times = itertools.chain([90.0] * (PROBES - 1), itertools.repeat(10.0))
    monkeypatch.setattr(RoundTimer, "ms", lambda _, rows, *__: rows * next(times))
    costs = round_costs(base, NativeRunner(1), pool_of(base, 300), 1)
    assert costs.to_json()["rows"] == module.ROWS
