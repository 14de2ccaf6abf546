"""The fake backend's models come back from what it writes aside, as those of every backend."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.backends.test_fake import LORA, TOKENS, batch, started
from tinkercloud.backends.base import Backend
from tinkercloud.backends.fake import TINY, FakeBackend
from tinkercloud.backends.fake_recovery import GRADIENT_FILE
from tinkercloud.config import Config
from tinkercloud.core.types import (
    AdamParams,
    FromCheckpoint,
    FromModel,
    SampleRequest,
    SamplingParams,
)
from tinkercloud.errors import StateCopyLost, StateDamaged, VersionLost

STEP = AdamParams(learning_rate=0.1, grad_clip_norm=0.5)


async def begun(tmp_path: Path) -> FakeBackend:
    backend = await started(tmp_path)
    for seed in (1, 2):
        await backend.forward_backward("m", batch("cross_entropy", seed))
    await backend.optim_step("m", STEP)
    await backend.forward_backward("m", batch("cross_entropy", 3))
    return backend


async def go_on(backend: Backend) -> list[object]:
    first = await backend.forward_backward("m", batch("cross_entropy", 4))
    step = await backend.optim_step("m", STEP)
    second = await backend.forward_backward("m", batch("cross_entropy", 5))
    return [first.metrics, step, second.metrics, *await samples(backend)]


async def samples(backend: Backend, version: str | None = None) -> list[object]:
    version = version or await backend.publish(FromModel("m"))
    request = SampleRequest(TOKENS, 2, SamplingParams(6, seed=3), prompt_logprobs=True)
    output = await backend.sample(version, request)
    assert output.prompt_logprobs is not None
    drawn = [(each.tokens.tobytes(), each.logprobs.tobytes()) for each in output.sequences]
    return [output.prompt_logprobs.tobytes(), *drawn]


async def written(backend: Backend, folder: Path) -> Path:
    await asyncio.to_thread(folder.mkdir)
    cost = await backend.write_state(await backend.copy_state("m"), folder)
    assert cost.num_bytes > 0
    return folder


async def test_a_restored_model_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    backend = await begun(tmp_path)
    state = await written(backend, tmp_path / "state")
    expected = await go_on(backend)
    again = FakeBackend(Config(data_dir=tmp_path))
    await again.restore_state("m", TINY.name, state)
    assert again._models["m"].lora == LORA
    assert await go_on(again) == expected
    assert (again.incarnation(), again.numerics()) == (0, f"numpy-{np.__version__}")


async def test_a_model_without_a_gradient_comes_back_without_one(tmp_path: Path) -> None:
    backend = await started(tmp_path)
    await backend.restore_state("m", TINY.name, await written(backend, tmp_path / "state"))
    assert backend._models["m"].gradient is None


async def test_a_copy_is_written_once_and_replaced_by_the_next(tmp_path: Path) -> None:
    backend = await begun(tmp_path)
    first = await backend.copy_state("m")
    second = await backend.copy_state("m")
    (tmp_path / "state").mkdir()
    await backend.write_state(second, tmp_path / "state")
    for copy in (first, second):
        with pytest.raises(StateCopyLost):
            await backend.write_state(copy, tmp_path)


async def test_a_written_version_is_published_again(tmp_path: Path) -> None:
    backend = await begun(tmp_path)
    version = await backend.publish(FromModel("m"))
    await backend.optim_step("m", STEP)
    (tmp_path / "version").mkdir()
    await backend.write_version(version, tmp_path / "version")
    expected = await samples(backend, version)
    again = FakeBackend(Config(data_dir=tmp_path))
    published = await again.publish(FromCheckpoint(TINY.name, tmp_path / "version"))
    assert await samples(again, published) == expected
    await backend.release(version)
    with pytest.raises(VersionLost):
        await backend.write_version(version, tmp_path)


@pytest.mark.parametrize("name", ["fake_model.npz", GRADIENT_FILE])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
async def test_a_damaged_folder_is_refused_by_name(tmp_path: Path, name: str, damage: str) -> None:
    backend = await begun(tmp_path)
    state = await written(backend, tmp_path / "state")
    content = bytearray((state / name).read_bytes())
    content[len(content) // 2] ^= 1
    (state / name).write_bytes(content[:-8] if damage == "cut" else content)
    if damage == "gone":
        (state / name).unlink()
    with pytest.raises(StateDamaged):
        await backend.restore_state("m", TINY.name, state)
