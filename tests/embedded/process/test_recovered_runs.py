"""A run through the API over an end of its engine, on a CPU: tests/gpu has the same on a GPU."""

from pathlib import Path

import pytest

from tests.embedded.process.test_engine_process import end_engine
from tests.gpu.recovery_bodies import NUM_STEPS, over_an_end
from tinkercloud.embedded.native.compiler import library
from tinkercloud.services.recovery import snapshots


@pytest.mark.slow  # two engines are started
@pytest.mark.skipif(library() is None, reason="there is no C compiler here")
async def test_a_run_over_an_end_of_its_engine_is_the_run_without_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "SHARE", 0.0)
    recovered = await over_an_end(folder, tmp_path / "data", end_engine)
    first = [(0, 1, "CreateModel"), (1, 2, "ForwardBackward"), (2, 3, "OptimStep")]
    assert recovered.operations[0] == recovered.operations[1]
    assert recovered.operations[0][:3] == first
    assert len(recovered.operations[0]) == 1 + 2 * NUM_STEPS
    assert (recovered.apart, recovered.deviation) == (0.0, 0.0)
    assert recovered.num_recovered == 2
