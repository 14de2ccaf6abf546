"""Streams and cancelled calls across the process boundary."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from tests.embedded.tiny import ask, random_prompt, same
from tests.waiting import async_wait_for
from tinkercloud.config import Config, EngineConfig, ModelSource
from tinkercloud.core.types import FromBase, TokenChunk
from tinkercloud.embedded.backend import EmbeddedBackend
from tinkercloud.errors import EngineDied

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")


@pytest.fixture
async def backend(folder: Path, tmp_path: Path) -> AsyncIterator[EmbeddedBackend]:
    engine = EngineConfig(threads=1)
    models = (ModelSource("tiny", folder),)
    backend = EmbeddedBackend(
        Config(data_dir=tmp_path, models=models, dtype="float32", engine=engine)
    )
    await backend.start()
    yield backend
    await backend.stop()


def cpu_s(pid: int) -> float:
    """The processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def block_until_idle(pid: int) -> None:
    """Hold this thread, its event loop with it, until the process computes no more."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        before_s = cpu_s(pid)
        time.sleep(1.0)
        if cpu_s(pid) - before_s < 0.04:
            return
    raise AssertionError("the process computes for ever")


async def test_tokens_come_while_the_engine_draws_and_are_those_of_the_result(
    backend: EmbeddedBackend,
) -> None:
    version = await backend.publish(FromBase("tiny"))
    request = ask(random_prompt(20, 1), n=4, max_tokens=800, use_eos=False)
    whole = await backend.sample(version, request)
    chunks: list[tuple[float, TokenChunk]] = []
    began = time.monotonic()
    output = await backend.sample(
        version, request, lambda chunk: chunks.append((time.monotonic(), chunk))
    )
    ended = time.monotonic()
    # All at once at the end would be 1; what holds up this process for a moment counts too.
    assert chunks[0][0] - began < 0.5 * (ended - began)
    for index, sequence in enumerate(output.sequences):
        own = [chunk for _, chunk in chunks if chunk.sample_index == index]
        assert np.array_equal(np.concatenate([c.tokens for c in own]), sequence.tokens)
        assert np.array_equal(np.concatenate([c.logprobs for c in own]), sequence.logprobs)
        assert [c.stop_reason for c in own] == [None] * (len(own) - 1) + ["length"]
    same(output, whole)


async def test_a_cancelled_call_ends_its_samples_and_no_others(backend: EmbeddedBackend) -> None:
    version = await backend.publish(FromBase("tiny"))
    request = ask(random_prompt(20, 1), n=2, max_tokens=200, use_eos=False)
    alone = await backend.sample(version, request)
    chunks: list[TokenChunk] = []
    endless = ask(random_prompt(20, 2), n=8, max_tokens=1000, use_eos=False)
    doomed = asyncio.create_task(backend.sample(version, endless, chunks.append))
    other = asyncio.create_task(backend.sample(version, request))
    await async_wait_for("tokens come", lambda: len(chunks), lambda number: number > 100)
    doomed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doomed
    num_chunks = len(chunks)
    same(await other, alone)
    await async_wait_for("nothing runs", backend.stats, lambda s: s["sampling_running"] == 0)
    assert backend.stats()["sampling_waiting"] == 0
    assert len(chunks) == num_chunks < 8000
    assert backend._host._pending == {}
    same(await backend.sample(version, request), alone)


async def test_a_stream_fails_with_its_engine(backend: EmbeddedBackend) -> None:
    version = await backend.publish(FromBase("tiny"))
    request = ask(random_prompt(20, 1), n=8, max_tokens=1000, use_eos=False)
    chunks: list[TokenChunk] = []
    call = asyncio.create_task(backend.sample(version, request, chunks.append))
    await async_wait_for("tokens come", lambda: len(chunks))
    os.kill(backend._host._process.pid, signal.SIGKILL)
    with pytest.raises(EngineDied):
        await call
    assert not any(chunk.stop_reason for chunk in chunks)


async def test_a_reader_that_stops_reading_does_not_stop_the_engine(
    backend: EmbeddedBackend,
) -> None:
    """The event loop that reads the stream is blocked; the engine draws on meanwhile."""
    version = await backend.publish(FromBase("tiny"))
    request = ask(random_prompt(20, 1), n=8, max_tokens=900, use_eos=False)
    chunks: list[TokenChunk] = []
    pid = backend._host._process.pid
    began_s, blocked_s = cpu_s(pid), list[float]()

    def on_tokens(chunk: TokenChunk) -> None:
        chunks.append(chunk)
        if len(chunks) == 1:  # it has most of its work before it
            block_until_idle(pid)
            blocked_s.append(cpu_s(pid) - began_s)

    output = await backend.sample(version, request, on_tokens)
    # Its idle rounds alone, or on a busy machine what a pause looked like the end of.
    assert cpu_s(pid) - began_s - blocked_s[0] < 0.5 * blocked_s[0]
    assert sum(len(c.tokens) for c in chunks) == sum(len(s.tokens) for s in output.sequences)
