"""The memory of bodies in flight: bounded together, shared between users, never a deadlock."""

import asyncio
import gzip
import resource
from pathlib import Path

import httpx
import pytest
import zstandard

from tests.api.harness import Api, serving
from tests.waiting import LIMIT_S
from tinkercloud.errors import PayloadTooLarge, TooManyRequests
from tinkercloud.routers.http.body_budget import FREE_BYTES, BodyBudget

MIB = 1024**2


async def test_bodies_take_no_more_than_the_budget_together() -> None:
    budget = BodyBudget(10 * MIB, wait_s=0.05)
    first, second, third = (budget.lease(user) for user in ("ann", "bob", "eve"))
    await first.grow(5 * MIB)
    await second.grow(5 * MIB)
    with pytest.raises(TooManyRequests, match="body_memory_bytes"):
        await third.grow(MIB)
    await third.grow(FREE_BYTES)  # a poll
    assert budget.used_bytes <= 10 * MIB
    first.release()
    await third.grow(MIB)
    second.release()
    third.release()
    assert budget.used_bytes == 0


async def test_a_body_waits_for_room_and_goes_on_when_another_ends() -> None:
    budget = BodyBudget(10 * MIB, wait_s=3600.0)
    first, second, third = (budget.lease(user) for user in ("ann", "bob", "eve"))
    await first.grow(5 * MIB)
    await second.grow(5 * MIB)
    waiting = asyncio.create_task(third.grow(4 * MIB))
    await asyncio.sleep(0)
    assert not waiting.done()
    first.release()
    async with asyncio.timeout(LIMIT_S):
        await waiting
    assert third.counted_bytes == 4 * MIB - FREE_BYTES


async def test_of_two_bodies_that_wait_for_each_other_one_is_refused_at_once() -> None:
    budget = BodyBudget(8 * MIB, wait_s=3600.0)
    first, second = budget.lease("ann"), budget.lease("bob")
    await first.grow(4 * MIB)
    await second.grow(3 * MIB)
    others = budget.lease("bob")
    await others.grow(MIB)
    waiting = asyncio.create_task(others.grow(MIB))
    await asyncio.sleep(0)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(TooManyRequests):
            await second.grow(MIB)
        second.release()
        await waiting


async def test_one_user_gets_half() -> None:
    budget = BodyBudget(8 * MIB, wait_s=0.05)
    first, second, other = budget.lease("ann"), budget.lease("ann"), budget.lease("bob")
    await first.grow(3 * MIB)
    with pytest.raises(TooManyRequests):
        await second.grow(2 * MIB)
    await other.grow(4 * MIB)
    with pytest.raises(PayloadTooLarge, match=str(4 * MIB)):
        await budget.lease("eve").grow(5 * MIB)


async def test_a_cancelled_wait_takes_nothing() -> None:
    budget = BodyBudget(8 * MIB)
    first, second = budget.lease("ann"), budget.lease("ann")
    await first.grow(4 * MIB)
    waiting = asyncio.create_task(second.grow(2 * MIB))
    await asyncio.sleep(0)
    first.release()  # granted, and cancelled before it runs on
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    second.release()
    assert budget.used_bytes == 0


def bomb(encoding: str, num_bytes: int) -> bytes:
    plain = bytes(num_bytes)
    return zstandard.compress(plain, 19) if encoding == "zstd" else gzip.compress(plain)


async def post(api: Api, encoding: str, body: bytes) -> httpx.Response:
    headers = {"content-encoding": encoding, "content-type": "application/x-protobuf"}
    return await api.http.post("/api/v1/forward_backward", content=body, headers=headers)


@pytest.mark.parametrize("encoding", ["zstd", "gzip"])
async def test_many_bombs_at_once_take_the_budget_and_others_go_on(
    tmp_path: Path, encoding: str
) -> None:
    body = bomb(encoding, 300 * MIB)
    settings = {"max_body_bytes": 512 * MIB, "body_memory_bytes": 64 * MIB}
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with serving(tmp_path, **settings) as api:
        sending = [asyncio.create_task(post(api, encoding, body)) for _ in range(6)]
        while not all(task.done() for task in sending):
            assert await api.session()
            await asyncio.sleep(0.005)
        statuses = {task.result().status_code for task in sending}
        assert statuses <= {413, 429}
        retry = [task.result() for task in sending if task.result().status_code == 429]
        assert all(response.headers["retry-after"] == "1" for response in retry)
        assert (await api.forward_backward(await api.model(), 1))["request_id"]
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    assert grown_kb < 250 * 1024


async def test_a_zstd_frame_with_a_window_that_http_does_not_allow_is_refused(api: Api) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27, compression_level=3)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    body = stream.compress(bytes(1000)) + stream.flush()
    response = await post(api, "zstd", body)
    assert response.status_code == 400
    assert "cannot be read" in response.json()["detail"]
