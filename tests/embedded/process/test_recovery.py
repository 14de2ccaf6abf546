"""Models come back after their engine process: its memory is counted, copied, and restored."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.embedded.process.test_engine_process import backend, config, end_engine, kill_engine
from tests.embedded.tiny import ask, random_prompt, supervised
from tinkercloud.backends.base import Backend
from tinkercloud.core.types import (
    AdamParams,
    FromBase,
    FromCheckpoint,
    FromModel,
    LoraSpec,
    TrainBatch,
)
from tinkercloud.embedded.backend import EmbeddedBackend
from tinkercloud.errors import EngineDied, StateCopyLost, StateDamaged, VersionLost

__all__ = ["backend"]  # a fixture

STEP = AdamParams(learning_rate=0.01)


def batch(seed: int) -> TrainBatch:
    return TrainBatch((supervised(20, seed),), "cross_entropy")


async def begin(backend: Backend, rank: int) -> None:
    await backend.create_model("m", "tiny", LoraSpec(rank=rank, seed=0))
    await backend.forward_backward("m", batch(1))
    await backend.optim_step("m", STEP)
    await backend.forward_backward("m", batch(2))


async def go_on(backend: Backend) -> list[object]:
    first = await backend.forward_backward("m", batch(3))
    step = await backend.optim_step("m", STEP)
    second = await backend.forward_backward("m", batch(4))
    logprobs = [each["logprobs"].tobytes() for each in (*first.outputs, *second.outputs)]
    version = await backend.publish(FromModel("m"))
    return [first.metrics, step, second.metrics, *logprobs, await drawn(backend, version)]


async def drawn(backend: Backend, version: str) -> list[tuple[bytes, bytes]]:
    output = await backend.sample(version, ask(random_prompt(5, 1), n=2, use_eos=False))
    return [(each.tokens.tobytes(), each.logprobs.tobytes()) for each in output.sequences]


@pytest.mark.parametrize("rank", [4, 0], ids=["LoRA", "full"])
async def test_a_model_goes_on_in_the_engine_after_one_that_was_killed(
    backend: EmbeddedBackend, tmp_path: Path, rank: int
) -> None:
    await begin(backend, rank)
    old = await backend.publish(FromModel("m"))
    (tmp_path / "state").mkdir()
    (tmp_path / "version").mkdir()
    cost = await backend.write_state(await backend.copy_state("m"), tmp_path / "state")
    assert cost.num_bytes > 0
    assert min(cost.copy_s, cost.write_s) > 0
    await backend.write_version(old, tmp_path / "version")
    expected = [await go_on(backend), await drawn(backend, old)]
    await end_engine(backend)
    await backend.restore_state("m", "tiny", tmp_path / "state")
    again = await backend.publish(FromCheckpoint("tiny", tmp_path / "version"))
    assert [await go_on(backend), await drawn(backend, again)] == expected


async def test_an_incarnation_ends_with_its_engine(
    backend: EmbeddedBackend, tmp_path: Path
) -> None:
    assert backend.incarnation() == 0
    numerics = backend.numerics()
    await begin(backend, 4)
    copy = await backend.copy_state("m")
    await kill_engine(backend)
    with pytest.raises(EngineDied):  # sent before its end was seen
        await backend.publish(FromBase("tiny"))
    assert backend.incarnation() == 0
    await backend.publish(FromBase("tiny"))
    assert backend.incarnation() == 1
    assert backend.numerics() == numerics
    with pytest.raises(StateCopyLost):
        await backend.write_state(copy, tmp_path)


async def test_bits_have_a_name_that_says_their_number_type_and_libraries(
    backend: EmbeddedBackend,
) -> None:
    words = backend.numerics().split(" ")
    assert "float32" in words
    assert any(word.startswith("torch-") for word in words)
    assert len(words) == len(set(words)) <= 6


async def test_operations_go_on_while_a_copy_is_written(
    backend: EmbeddedBackend, tmp_path: Path
) -> None:
    await begin(backend, 0)
    (tmp_path / "state").mkdir()
    writing = asyncio.create_task(
        backend.write_state(await backend.copy_state("m"), tmp_path / "state")
    )
    expected = await go_on(backend)
    await writing
    await backend.restore_state("m", "tiny", tmp_path / "state")
    assert await go_on(backend) == expected


async def test_a_dropped_copy_is_gone(backend: EmbeddedBackend, tmp_path: Path) -> None:
    await begin(backend, 0)
    copy = await backend.copy_state("m")
    for _ in range(2):
        await backend.drop_copy(copy)
    with pytest.raises(StateCopyLost):
        await backend.write_state(copy, tmp_path)


async def test_a_write_that_fails_says_so_and_the_next_one_works(
    backend: EmbeddedBackend, tmp_path: Path
) -> None:
    await begin(backend, 4)
    copy = await backend.copy_state("m")
    with pytest.raises(Exception, match="nowhere"):
        await backend.write_state(copy, tmp_path / "nowhere")
    with pytest.raises(StateCopyLost):
        await backend.write_state(copy, tmp_path / "nowhere")
    with pytest.raises(StateDamaged):
        await backend.restore_state("m", "tiny", tmp_path / "nowhere")
    with pytest.raises(VersionLost):
        await backend.write_version("v-0", tmp_path)
    (tmp_path / "state").mkdir()
    await backend.write_state(await backend.copy_state("m"), tmp_path / "state")


def resident_bytes(backend: EmbeddedBackend) -> int:
    assert backend._host._process is not None
    pages = Path(f"/proc/{backend._host._process.pid}/statm").read_text().split()[1]
    return int(pages) * 4096


async def test_the_memory_of_copies_is_freed(folder: Path, tmp_path: Path) -> None:
    """Of a model of 11 MB with its moments and gradient: fifty copies would be half a gigabyte."""
    backend = EmbeddedBackend(config(folder, tmp_path))
    await backend.start()
    try:
        await backend.create_model("m", "tiny", LoraSpec(rank=512, seed=0))
        await backend.forward_backward("m", batch(1))
        sizes = []
        for number in range(50):
            directory = tmp_path / f"state-{number}"
            directory.mkdir()
            copy = await backend.copy_state("m")
            if number % 2:
                num_bytes = (await backend.write_state(copy, directory)).num_bytes
                sizes.append(resident_bytes(backend))
        assert num_bytes > 8e6
        growth = sizes[-1] - np.median(sizes[:5])
        assert growth < 5 * num_bytes
    finally:
        await backend.stop()
