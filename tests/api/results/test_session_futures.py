"""One poll for all samples of a sampling session, cancelling samples, joining sampling sessions."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from tests.api.harness import Api, HeldBackend, serving
from tests.api.thread_server import PROMPT, thread_server
from tests.waiting import LIMIT_S, async_wait_for, wait_for
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.config import Config
from tinkercloud.core.completion_log import CLIENT_BLOCK
from tinkercloud.core.task_manager import TaskManager
from tinkercloud.storage.futures import Outcome

MODEL = "fake/tiny"


async def poll(
    api: Api, sampler: str, cursor: int = 0, client: int = 0, **fields: object
) -> tuple[list[dict], int]:
    target = {"type": "sampling_session", "sampling_session_id": sampler}
    body = {"target": target | {"cloned_sampler_id": client}, "prev_cursor": cursor, **fields}
    reply = await api.ok("retrieve_futures", **body)
    return reply["completions"], reply["cursor"]


async def finished(api: Api, sampler: str, seq_id: int) -> str:
    accepted = await api.sample(sampler, seq_id=seq_id)
    await api.result(accepted)
    return accepted["request_id"]


async def until_running(backend: "HeldSamples", number: int) -> None:
    await async_wait_for(
        f"{number} calls run", lambda: backend.num_running, lambda running: running == number
    )


def ids(completions: list[dict]) -> list[str]:
    return [completion["request_id"] for completion in completions]


async def test_a_finished_sample_is_reported_once_with_the_size_of_its_result(api: Api) -> None:
    sampler = await api.sampler(await api.session())
    request_id = await finished(api, sampler, 0)
    completions, cursor = await poll(api, sampler, timeout=0)
    payload = (await api.retrieve(request_id)).content
    assert completions == [
        {
            "state": "finished",
            "request_id": request_id,
            "response_payload_uncompressed_size": len(payload),
        }
    ]
    assert await poll(api, sampler, cursor, timeout=0) == ([], cursor)
    second = await finished(api, sampler, 1)
    completions, later = await poll(api, sampler, cursor, timeout=0)
    assert ids(completions) == [second]
    assert later > cursor


async def test_an_unacknowledged_report_comes_again(api: Api) -> None:
    sampler = await api.sampler(await api.session())
    _, cursor = await poll(api, sampler, timeout=0)
    request_id = await finished(api, sampler, 0)
    for _ in range(2):
        completions, _ = await poll(api, sampler, cursor, timeout=0)
        assert ids(completions) == [request_id]


async def test_a_failed_sample_is_reported_as_failed(api: Api) -> None:
    sampler = await api.sampler(await api.session())
    accepted = await api.sample(sampler, seq_id=0, sampling_params={"max_tokens": -1})
    await api.failure(accepted)
    completions, _ = await poll(api, sampler, timeout=0)
    assert completions == [{"state": "failed", "request_id": accepted["request_id"]}]


async def test_the_poll_is_held_until_something_finishes(tmp_path: Path) -> None:
    backend = HeldBackend(tmp_path)
    async with serving(tmp_path, backend=backend, hold_s=3600.0) as api:
        sampler = await api.sampler(await api.session())
        backend.hold()
        accepted = await api.sample(sampler, seq_id=0)
        assert (await poll(api, sampler, timeout=0))[0] == []
        polling = asyncio.create_task(poll(api, sampler))
        await asyncio.sleep(0.1)
        assert not polling.done()
        backend.gate.set()
        async with asyncio.timeout(LIMIT_S):
            completions, _ = await polling
        assert ids(completions) == [accepted["request_id"]]


async def test_the_poll_ends_empty_after_the_hold(tmp_path: Path) -> None:
    async with serving(tmp_path, hold_s=0.1) as api:
        sampler = await api.sampler(await api.session())
        began = time.monotonic()
        assert (await poll(api, sampler))[0] == []
        assert time.monotonic() - began >= 0.1
        async with asyncio.timeout(LIMIT_S):  # of the poll's own thousand seconds
            assert (await poll(api, sampler, timeout=1000.0))[0] == []


async def test_clients_of_one_sampling_session_hear_of_their_own_samples(api: Api) -> None:
    sampler = await api.sampler(await api.session())
    first = await finished(api, sampler, 7)
    clone = await finished(api, sampler, 3 * CLIENT_BLOCK + 7)
    assert ids((await poll(api, sampler, timeout=0))[0]) == [first]
    assert ids((await poll(api, sampler, client=3, timeout=0))[0]) == [clone]
    assert (await poll(api, sampler, client=1, timeout=0))[0] == []


async def test_what_finishes_before_or_after_a_restart_is_reported_after_it(tmp_path: Path) -> None:
    backend = FakeBackend(Config(data_dir=tmp_path))
    async with serving(tmp_path, backend=backend) as api:
        sampler = await api.sampler(await api.session())
        done = await finished(api, sampler, 0)
        _, cursor = await poll(api, sampler, timeout=0)
        backend._latency_s = 30.0
        underway = await api.sample(sampler, seq_id=1)
    async with serving(tmp_path) as api:
        await api.result(underway)
        completions, later = await poll(api, sampler, cursor, timeout=0)
        states = {c["request_id"]: c["state"] for c in completions}
        assert states[underway["request_id"]] == "finished"
        assert set(states) <= {
            done,
            underway["request_id"],
        }  # one that finished shortly before may come twice
        assert later > cursor
        assert await poll(api, sampler, later, timeout=0) == ([], later)


async def test_nobody_polls_the_session_of_somebody_else(api: Api) -> None:
    sampler = await api.sampler(await api.session())
    await finished(api, sampler, 0)
    body = {"target": {"sampling_session_id": sampler}, "timeout": 0}
    assert (await api.as_user("bob").post("retrieve_futures", **body)).status_code == 404
    unknown = {"target": {"sampling_session_id": "none"}, "timeout": 0}
    assert (await api.post("retrieve_futures", **unknown)).status_code == 404


@pytest.mark.parametrize("fields", [{"timeout": -1.0}, {"prev_cursor": -1}, {"prev_cursor": 2**63}])
async def test_a_faulty_poll_is_refused(api: Api, fields: dict[str, float]) -> None:
    sampler = await api.sampler(await api.session())
    body = {"target": {"sampling_session_id": sampler}, **fields}
    assert (await api.post("retrieve_futures", **body)).status_code == 422


# cancelling


class HeldSamples(FakeBackend):
    """Samples that never end by themselves."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.num_running = self.num_cancelled = 0

    async def sample(self, version, request, on_tokens=None):
        self.num_running += 1
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1


async def test_a_cancelled_sample_fails_at_once_and_its_work_ends(tmp_path: Path) -> None:
    backend = HeldSamples(Config(data_dir=tmp_path))
    async with serving(tmp_path, backend=backend) as api:
        sampler = await api.sampler(await api.session())
        kept, dropped = [await api.sample(sampler, seq_id=i) for i in range(2)]
        await until_running(backend, 2)
        await api.ok("cancel_future", request_id=dropped["request_id"])
        assert "cancelled by its client" in await api.failure(dropped)
        await asyncio.sleep(0)
        assert (backend.num_running, backend.num_cancelled) == (1, 1)
        assert (await api.get(f"retrieve_future/{kept['request_id']}")).json()[
            "status"
        ] == "pending"
        await api.ok("cancel_future", request_id=dropped["request_id"])  # again: without effect


async def test_cancelling_a_finished_sample_keeps_its_result(api: Api) -> None:
    request_id = await finished(api, await api.sampler(await api.session()), 0)
    before = (await api.retrieve(request_id)).content
    await api.ok("cancel_future", request_id=request_id)
    assert (await api.retrieve(request_id)).content == before


async def test_only_the_owner_cancels(tmp_path: Path) -> None:
    backend = HeldSamples(Config(data_dir=tmp_path))
    async with serving(tmp_path, backend=backend) as api:
        accepted = await api.sample(await api.sampler(await api.session()), seq_id=0)
        await until_running(backend, 1)
        refusal = await api.as_user("bob").post("cancel_future", request_id=accepted["request_id"])
        assert refusal.status_code == 410
        assert (await api.post("cancel_future", request_id="sample-none")).status_code == 410
        assert backend.num_running == 1


async def test_the_end_of_a_session_ends_its_samples_and_no_others(tmp_path: Path) -> None:
    backend = HeldSamples(Config(data_dir=tmp_path))
    async with serving(tmp_path, backend=backend) as api:
        ending, staying = await api.session(), await api.session()
        sampler, other = await api.sampler(ending), await api.sampler(staying)
        dropped = [await api.sample(sampler, seq_id=i) for i in range(3)]
        kept = await api.sample(other, seq_id=0)
        await until_running(backend, 4)
        await api.ok(f"sessions/{ending}/finish", reason={"type": "success"}, detail=None)
        await until_running(backend, 1)
        for accepted in dropped:
            assert "its session has ended" in await api.failure(accepted)
        assert (await api.get(f"retrieve_future/{kept['request_id']}")).json()[
            "status"
        ] == "pending"


async def test_training_operations_are_not_cancelled(tmp_path: Path) -> None:
    backend = HeldBackend(tmp_path)
    async with serving(tmp_path, backend=backend) as api:
        model = await api.model()
        backend.hold()
        running, queued = [await api.optim_step(model, seq_id) for seq_id in (1, 2)]
        for accepted in (running, queued):
            refusal = await api.post("cancel_future", request_id=accepted["request_id"])
            assert refusal.status_code == 400
            assert "only samples can" in refusal.json()["detail"]
        backend.gate.set()
        for accepted in (running, queued):
            assert "metrics" in await api.result(accepted)


# joining


async def test_every_client_that_joins_gets_its_own_number(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        session = await api.session()
        sampler, other = await api.sampler(session), await api.sampler(session, 1)
        joins = [api.ok("join_sampling_session", sampling_session_id=sampler) for _ in range(5)]
        numbers = [reply["client_counter"] for reply in await asyncio.gather(*joins)]
        assert sorted(numbers) == [1, 2, 3, 4, 5]
        first = await api.ok("join_sampling_session", sampling_session_id=other)
        assert first["client_counter"] == 1
    async with serving(tmp_path) as api:  # samples of earlier clients are on record: no reuse
        reply = await api.ok("join_sampling_session", sampling_session_id=sampler)
        assert reply["client_counter"] == 6
        bob = api.as_user("bob")
        refusal = await bob.post("join_sampling_session", sampling_session_id=sampler)
        assert refusal.status_code == 404


# the official client, with each flag


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldSamples]:
    """A server whose samples never end, and the environment by which the SDK finds it."""
    backend = HeldSamples(Config(data_dir=tmp_path))
    with thread_server(tmp_path, backend=backend) as (base_url, key):
        monkeypatch.setenv("TINKER_BASE_URL", base_url)
        monkeypatch.setenv("TINKER_API_KEY", key)
        yield backend


def test_the_sdk_polls_by_session(tmp_path: Path) -> None:
    flags = {"sample_use_retrieve_futures": True}
    with thread_server(tmp_path, **flags) as (base_url, key):
        service = tinker.ServiceClient(base_url=base_url, api_key=key)
        sampler = service.create_sampling_client(base_model=MODEL).result()
        params = types.SamplingParams(max_tokens=4, seed=1)
        futures = [sampler.sample(PROMPT, 2, params) for _ in range(30)]
        assert {len(future.result().sequences) for future in futures} == {2}
        bad = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=-1))
        with pytest.raises(tinker.RequestFailedError, match="max_tokens"):
            bad.result()
        service.close("success").result()


def test_clones_of_the_sdk_join_their_session(tmp_path: Path) -> None:
    flags = {"sample_use_retrieve_futures": True, "sample_join_sampling_session": True}
    with thread_server(tmp_path, **flags) as (base_url, key):
        service = tinker.ServiceClient(base_url=base_url, api_key=key)
        original = service.create_sampling_client(base_model=MODEL).result()
        rebuild, arguments = original.__reduce__()[:2]
        clones = [rebuild(*arguments) for _ in range(2)]
        params = types.SamplingParams(max_tokens=4, seed=1)
        futures = [client.sample(PROMPT, 1, params) for client in (original, *clones)]
        tokens = [future.result().sequences[0].tokens for future in futures]
        assert tokens[1:] == tokens[:-1]
        assert sorted(clone._cloned_sampler_id for clone in clones) == [1, 2]
        service.close("success").result()


def test_a_sample_that_the_sdk_abandons_is_cancelled(
    held: HeldSamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the SDK polls for it: before, it does not know its name, and has nothing to cancel."""
    wait_held, is_polled = TaskManager.wait, threading.Event()

    async def watched(tasks: TaskManager, request_id: str, *arguments: Any) -> Outcome | None:
        if request_id.startswith("sample-"):
            is_polled.set()
        return await wait_held(tasks, request_id, *arguments)

    monkeypatch.setattr(TaskManager, "wait", watched)

    async def abandon(sampler: tinker.SamplingClient) -> None:
        params = types.SamplingParams(max_tokens=4)

        async def wait() -> None:
            await sampler.sample(PROMPT, 1, params)

        sample = asyncio.create_task(wait())
        await until_running(held, 1)
        await async_wait_for("it is polled for", is_polled.is_set)
        sample.cancel()
        await asyncio.gather(sample, return_exceptions=True)

    service = tinker.ServiceClient()
    asyncio.run(abandon(service.create_sampling_client(base_model=MODEL).result()))
    wait_for("it is cancelled", lambda: held.num_cancelled, lambda cancelled: cancelled == 1)
    service.close("success").result()
