"""Placement groups on a real Ray cluster of two simulated nodes with four CPU bundles each."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.cluster.ray_cluster import groups_alive, two_nodes, wait_until_settled
from tests.waiting import async_wait_for
from tinkercloud.cluster.gpus import placement
from tinkercloud.cluster.gpus.placement import Bundle, Placer, Request, in_rank_order, release
from tinkercloud.errors import CapacityTimeout


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[object]:
    with two_nodes(cpus=4) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    wait_until_settled()


def wish(num_bundles: int, name: str = "model", **options) -> Request:
    return Request(name, num_bundles, device="cpu", **{"timeout_s": 240.0} | options)


def test_bundles_are_ordered_by_address_as_a_number_then_node_then_gpu():
    shuffled = [
        Bundle(0, "n2", "10.0.0.10", 0),
        Bundle(1, "n1", "10.0.0.9", 3),
        Bundle(2, "n1", "10.0.0.9", 1),
        Bundle(3, "n4", "10.0.0.9", 0),
        Bundle(4, "n2", "10.0.0.10", -1),
        Bundle(5, "n3", "some-host", 0),
    ]
    assert [bundle.index for bundle in in_rank_order(shuffled)] == [2, 1, 3, 4, 0, 5]


async def test_ranks_of_one_node_are_neighbours():
    taken = await Placer().take(wish(8))
    nodes = [bundle.node_id for bundle in taken.bundles]
    assert len(set(nodes)) == 2
    assert nodes == sorted(nodes)
    assert sorted(bundle.index for bundle in taken.bundles) == list(range(8))
    await release(taken)


async def test_packed_bundles_share_a_node_and_spread_ones_do_not():
    packed = await Placer().take(wish(2, strategy="PACK"))
    assert len({bundle.node_id for bundle in packed.bundles}) == 1
    spread = await Placer().take(wish(2, strategy="SPREAD"))
    assert len({bundle.node_id for bundle in spread.bundles}) == 2
    await release(packed)
    await release(spread)


async def test_two_models_share_the_cluster():
    placer = Placer()
    first, second = await asyncio.gather(placer.take(wish(3, "a")), placer.take(wish(4, "b")))
    assert sorted(groups_alive()) == ["a", "b"]
    await release(first)
    await release(second)


async def test_a_request_that_finds_too_few_gpus_waits_says_why_and_is_served_later():
    placer, told = Placer(), []
    first = await placer.take(wish(6, "first"))
    second = asyncio.create_task(placer.take(wish(4, "second"), told.append))
    await async_wait_for(
        "it says why it waits",
        lambda: told[-1:],
        lambda last: last == ["waiting until 4 CPU bundles are free"],
    )
    assert not second.done()
    await release(first)
    taken = await second
    assert told[-1] is None
    await release(taken)


async def test_a_small_model_does_not_overtake_a_large_one():
    placer = Placer()
    first = await placer.take(wish(6))
    large = asyncio.create_task(placer.take(wish(8, "large")))
    await asyncio.sleep(0.2)
    small = asyncio.create_task(placer.take(wish(1, "small")))
    await asyncio.sleep(1.0)
    assert not small.done()
    await release(first)
    await release(await large)
    await release(await small)


async def test_a_request_that_times_out_says_so_and_leaves_the_queue():
    placer = Placer()
    with pytest.raises(CapacityTimeout, match=r"model got no 9 CPU bundles within 1\.5 s"):
        await placer.take(wish(9, timeout_s=1.5))
    await release(await placer.take(wish(8)))


async def test_a_request_that_waits_behind_another_times_out_too():
    placer = Placer()
    impossible = asyncio.create_task(placer.take(wish(9, timeout_s=4.0)))
    await asyncio.sleep(0.2)
    with pytest.raises(CapacityTimeout):
        await placer.take(wish(1, timeout_s=0.5))
    with pytest.raises(CapacityTimeout):
        await impossible


async def test_a_cancelled_request_leaves_no_group_and_does_not_block_the_queue():
    placer = Placer()
    waiting = asyncio.create_task(placer.take(wish(9)))
    await asyncio.sleep(1.0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await release(await placer.take(wish(8)))


@pytest.mark.parametrize("step", ["_until_created", "_probe"])
async def test_a_fault_at_any_step_leaves_no_group(monkeypatch, step):
    async def broken(*_: object) -> None:
        raise RuntimeError("injected")

    placer = Placer()
    with monkeypatch.context() as patch:
        patch.setattr(placement, step, broken)
        for _ in range(4):  # Ray may be anywhere in preparing the bundles
            with pytest.raises(RuntimeError, match="injected"):
                await placer.take(wish(2))
    await asyncio.to_thread(wait_until_settled)
    await release(await placer.take(wish(2)))
