"""What a client leaves out is on record as it was taken: later versions may have other defaults."""

from pathlib import Path
from typing import Any

import pytest

from tests.api.harness import Api, serving
from tests.api.recovery.test_recovery import after_its_end, goes_on
from tinkercloud.services.recovery import snapshots, training_outcomes


class OtherDefaults(training_outcomes.JsonAdamParams):
    learning_rate: float = 0.5
    beta1: float = 0.1
    beta2: float = 0.2
    eps: float = 0.5


@pytest.mark.parametrize("fields", [{}, {"optimizer_params": {"type": "adamw", "beta1": 0.8}}])
async def test_a_step_is_done_again_with_the_defaults_of_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(snapshots, "SHARE", 0.0)
    async with serving(tmp_path / "a") as api:
        model_id = await api.model()
        await api.result(await api.forward_backward(model_id, 1))
        step = await api.ok("optim_step", model_id=model_id, seq_id=2, **fields)
        await api.result(step)
        await api.result(await api.forward_backward(model_id, 3))
        with monkeypatch.context() as later:
            later.setattr(training_outcomes, "JsonAdamParams", OtherDefaults)
            async with after_its_end(api, tmp_path / "a", tmp_path / "b") as other:
                assert await is_repeated(other, model_id, fields, step)
                again = await goes_on(other, model_id, 4)
        assert again == await goes_on(api, model_id, 4)


async def is_repeated(api: Api, model_id: str, fields: dict[str, Any], step: Any) -> bool:
    repeat = await api.ok("optim_step", model_id=model_id, seq_id=2, **fields)
    return repeat["request_id"] == step["request_id"]
