"""After an end of an engine on a GPU no operation is lost or done twice, and what the replay could
not repeat is measured."""

from pathlib import Path

import pytest

from tests.embedded.process.test_engine_process import end_engine
from tests.embedded.tiny import write_tiny_model
from tests.gpu.recovery_bodies import over_an_end
from tinkercloud.services.recovery import snapshots


async def test_a_run_goes_on_over_an_end_of_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "SHARE", 0.0)
    model = write_tiny_model(tmp_path / "model")
    recovered = await over_an_end(model, tmp_path / "data", end_engine)
    assert "cuda" in recovered.numerics
    assert recovered.operations[0] == recovered.operations[1]
    assert recovered.num_recovered == 2
    # Sums of other orders: far less than what an operation too many or too few makes.
    assert recovered.apart < 0.05
    assert recovered.deviation < 0.05
