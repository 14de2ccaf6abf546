"""Results of tens of megabytes: bounded by what is asked for, sent in pieces, and counted."""

import asyncio
import json
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.api.harness import Api, serving
from tests.waiting import LIMIT_S
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.config import Config
from tinkercloud.core.types import SampledSequence, SampleOutput, Topk, TrainOutput
from tinkercloud.wire.codec import encode_sample_output
from tinkercloud.wire.json_view import BLOCK, is_finite, sample_output_json, train_output_json

MIB = 1024**2
JSON = {"accept": "application/json"}


def large_output(positions: int, k: int) -> SampleOutput:
    ids = np.arange(positions * k, dtype=np.int32).reshape(positions, k)
    values = -np.linspace(0, 30, positions * k, dtype=np.float32).reshape(positions, k)
    values[0] = -99999.0
    one = SampledSequence(np.array([5], np.int32), np.array([-0.5], np.float32), "length")
    return SampleOutput((one,), topk_prompt_logprobs=Topk(ids, values))


@asynccontextmanager
async def with_large_sample(
    tmp_path: Path, positions: int, k: int, **settings: Any
) -> AsyncIterator[tuple[Api, str]]:
    """A server and the id of a finished sample of positions x k pairs."""
    backend = FakeBackend(Config(data_dir=tmp_path))

    async def sample(*_: object) -> SampleOutput:
        return large_output(positions, k)

    backend.sample = sample  # type: ignore[method-assign]
    async with serving(tmp_path, backend=backend, **settings) as api:
        accepted = await api.sample(await api.sampler(await api.session()))
        await api.result(accepted)
        yield api, accepted["request_id"]


async def longest_wait_s(api: Api, work: "asyncio.Task[Any]") -> float:
    """Of a request that another client repeats until the work is done: this process's CPU time from
    one to the next, which others on the machine do not change."""
    longest = 0.0
    while not work.done():
        begun = time.process_time()
        assert (await api.http.get("/healthz")).status_code == 200
        await asyncio.sleep(0.001)
        longest = max(longest, time.process_time() - begun)
    await work
    return longest


@pytest.mark.parametrize("form", ["status", "plain"])
async def test_others_are_answered_while_a_large_result_is_written_as_json(
    tmp_path: Path, form: str
) -> None:
    positions, k = 4096, 100
    async with with_large_sample(tmp_path, positions, k) as (api, request_id):
        if form == "status":
            asked = api.get(f"retrieve_future/{request_id}", wait_s=1)
        else:
            asked = api.retrieve(request_id, **JSON)
        work = asyncio.create_task(asked)
        longest_s = await longest_wait_s(api, work)
        value = work.result().json()
        result = value["result"] if form == "status" else value
        rows = result["topk_prompt_logprobs"]
        assert [len(row) for row in rows[1:]] == [k] * (positions - 1)
        assert (rows[0], rows[2][1][0]) == (None, 2 * k + 1)
        # To write it takes a second; each step of that a few milliseconds.
        assert longest_s < 0.3


class SlowReaders:
    """The app before clients that take no byte of an answer until `reading` is set."""

    def __init__(self, app: ASGIApp):
        self._app = app
        self.reading = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_when_read(message: Message) -> None:
            if message.get("status") == 200:
                await self.reading.wait()
            await send(message)

        await self._app(scope, receive, send_when_read)


async def test_large_answers_count_with_the_bodies_and_are_refused_as_a_client_repeats_it(
    tmp_path: Path,
) -> None:
    settings = {"max_body_bytes": MIB, "body_memory_bytes": 8 * MIB}
    async with with_large_sample(tmp_path, 2000, 100, **settings) as (api, request_id):
        kept = (await api.retrieve(request_id)).content
        assert kept == encode_sample_output(large_output(2000, 100))
        readers = SlowReaders(api.app)
        slow = replace(api, app=readers)
        work = [asyncio.create_task(slow.retrieve(request_id)) for _ in range(8)]
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        readers.reading.set()
        answers = await asyncio.gather(*work)
        refused = [answer for answer in answers if answer.status_code != 200]
        assert 0 < len(refused) < len(answers)
        assert {answer.status_code for answer in refused} == {429}
        assert {answer.headers["retry-after"] for answer in refused} == {"1"}
        assert {answer.content for answer in answers if answer.status_code == 200} == {kept}
        assert (await api.retrieve(request_id)).status_code == 200  # all was given back


async def test_the_json_of_a_large_result_takes_little_more_memory_than_the_result(
    tmp_path: Path,
) -> None:
    async with with_large_sample(tmp_path, 8000, 100) as (api, request_id):
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        url = f"/api/v1/retrieve_future/{request_id}"
        num_bytes = 0
        async with api.http.stream("GET", url) as response:
            async for piece in response.aiter_bytes():
                num_bytes += len(piece)
        assert num_bytes > 20 * MIB
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    assert grown_kb < 150 * 1024


def test_the_text_in_blocks_is_the_text_of_the_whole() -> None:
    length = 2 * BLOCK + 3
    numbers = np.linspace(-1, 0, length, dtype=np.float32)
    numbers[5] = np.nan
    output = TrainOutput(({"logprobs": numbers},), {"loss:sum": 2.5})
    [datum] = json.loads("".join(train_output_json(output)))["loss_fn_outputs"]
    expected = [None if np.isnan(number) else number for number in numbers.tolist()]
    assert datum["logprobs"] == {"data": expected, "dtype": "float32", "shape": [length]}
    assert not is_finite(output)
    empty = SampledSequence(np.zeros(0, np.int32), np.zeros(0, np.float32), "stop")
    view = json.loads("".join(sample_output_json(SampleOutput((empty,)))))
    assert view["sequences"] == [{"stop_reason": "stop", "tokens": [], "logprobs": []}]


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"topk_prompt_logprobs": 4}, ["topk_prompt_logprobs 4 x 3 of the prompt", "12"]),
        ({"prompt_alt_tokens_k": 2, "topk_prompt_logprobs": 2}, ["prompt_alt_tokens_k 2 x 3"]),
        (
            {"topk_sample_logprobs": 3, "num_samples": 2},
            ["topk_sample_logprobs 3 x 2 x 2 of samples", "12"],
        ),
    ],
    ids=str,
)
async def test_more_alternatives_than_the_limit_fail_with_the_numbers(
    tmp_path: Path, fields: dict[str, int], numbers: list[str]
) -> None:
    async with serving(tmp_path, max_topk_logprobs=11) as api:
        sampler = await api.sampler(await api.session())
        text = await api.failure(await api.sample(sampler, **fields))
        assert all(number in text for number in [*numbers, "at most 11", "max_topk_logprobs"])
        assert await api.result(await api.sample(sampler, topk_prompt_logprobs=3))
