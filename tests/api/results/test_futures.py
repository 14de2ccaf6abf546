"""Acknowledgement, waiting, results, and what survives."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.api.harness import Api, HeldBackend, serving, without_background
from tests.storage.counting import commits_of, reads_of
from tests.waiting import LIMIT_S, async_wait_for
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.config import Config
from tinkercloud.core.types import SampleOutput
from tinkercloud.errors import EngineDied, StorageFailed
from tinkercloud.storage.futures import FuturesStorage
from tinkercloud.wire.codec import encode_sample_output


def slow(tmp_path: Path, latency_s: float) -> FakeBackend:
    return FakeBackend(Config(data_dir=tmp_path), latency_s=latency_s)


async def test_a_pending_result_is_answered_408_after_the_hold(tmp_path: Path) -> None:
    backend = HeldBackend(tmp_path)
    async with serving(tmp_path, backend=backend, hold_s=0.05) as api:
        session_id = await api.session()
        backend.hold()
        accepted = await api.ok(
            "create_model", session_id=session_id, model_seq_id=0, base_model="fake/tiny"
        )
        response = await api.retrieve(accepted["request_id"])
        assert response.status_code == 408
        assert response.json() == {
            "type": "try_again",
            "request_id": accepted["request_id"],
            "queue_state": "active",
        }
        backend.gate.set()
        assert (await api.result(accepted))["type"] == "create_model"


async def test_the_long_poll_wakes_at_once_and_leaves_the_database_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what happens, not by a clock: it wakes with the outcome, and not with the end of the hold,
    which is an hour away."""
    backend = HeldBackend(tmp_path)
    without_background(monkeypatch)
    async with serving(tmp_path, backend=backend, hold_s=3600.0) as api:
        model_id = await api.model()
        backend.hold()
        accepted = await api.optim_step(model_id, 1)
        wait, is_held = api.services.tasks.wait, asyncio.Event()

        async def watched(*arguments):
            is_held.set()
            return await wait(*arguments)

        api.services.tasks.wait = watched  # type: ignore[method-assign]
        poll = asyncio.create_task(api.retrieve(accepted["request_id"]))
        await is_held.wait()
        database = api.services.database
        reads, commits = reads_of(database), commits_of(database)
        await asyncio.sleep(0.2)
        assert (reads, commits) == ([], [])
        assert not poll.done()
        backend.gate.set()
        async with asyncio.timeout(LIMIT_S):
            assert (await poll).status_code == 200
        assert reads == []


async def test_a_result_can_be_read_again(api: Api) -> None:
    model_id = await api.model()
    accepted = await api.optim_step(model_id, 1)
    first = await api.result(accepted)
    assert await api.result(accepted) == first
    assert set(first["metrics"]) == {"unclipped_grad_l2:mean"}


async def test_an_unknown_training_request_is_404_and_a_sampling_one_410(api: Api) -> None:
    assert (await api.retrieve("train-00")).status_code == 404
    assert (await api.retrieve("sample-00")).status_code == 410
    assert (await api.retrieve("x", **{"X-Tinker-Request-Type": "Sample"})).status_code == 410
    assert (await api.retrieve("x", **{"X-Tinker-Request-Type": "OptimStep"})).status_code == 404


async def test_results_belong_to_who_asked_for_them(api: Api) -> None:
    bob = api.as_user("bob")
    accepted = await api.optim_step(await api.model(), 1)
    await api.result(accepted)
    assert (await bob.retrieve(accepted["request_id"])).status_code == 404


async def test_the_log_says_why_a_result_is_unknown(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    accepted = await api.optim_step(await api.model(), 1)
    await api.result(accepted)
    await api.as_user("bob").retrieve(accepted["request_id"])
    await api.retrieve("train-00\nanother line")
    theirs, nobodys = (record.getMessage() for record in caplog.records[-2:])
    assert theirs.startswith("bob asked for")
    assert "which is completed for user" in theirs
    assert nobodys.endswith("which is not on record")
    assert "\n" not in nobodys


async def test_a_pending_result_is_hidden_from_others_too(tmp_path: Path) -> None:
    async with serving(tmp_path, backend=slow(tmp_path, 0.3)) as api:
        session_id = await api.session()
        accepted = await api.ok(
            "create_model", session_id=session_id, model_seq_id=0, base_model="fake/tiny"
        )
        assert (await api.as_user("bob").retrieve(accepted["request_id"])).status_code == 404


async def test_results_survive_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        accepted = await api.forward_backward(await api.model(), 1)
        before = await api.retrieve(accepted["request_id"])
    async with serving(tmp_path) as api:
        after = await api.retrieve(accepted["request_id"])
    assert (after.status_code, after.content) == (200, before.content)
    assert after.headers["content-type"] == "application/x-protobuf"


async def test_a_stop_lets_what_runs_end_and_what_waits_runs_after_the_start(
    tmp_path: Path,
) -> None:
    backend = HeldBackend(tmp_path)
    async with serving(tmp_path, backend=backend) as api:
        model_id = await api.model()
        backend.hold()
        running, queued = [await api.optim_step(model_id, seq_id) for seq_id in (1, 2)]
        await backend.waiting.wait()
        stopping = asyncio.create_task(api.services.stop_work())
        await asyncio.sleep(0)  # from here on nothing begins
        backend.gate.set()
        await stopping
        rows = await api.services.database.all("SELECT status FROM futures ORDER BY seq_id")
        assert [row["status"] for row in rows] == ["completed", "completed", "pending"]
    async with serving(tmp_path) as api:
        for accepted in (running, queued):
            assert "metrics" in await api.result(accepted)


async def test_what_was_not_kept_of_a_killed_server_is_failed_at_start(tmp_path: Path) -> None:
    """As of a backend whose models do not come back."""
    async with serving(tmp_path) as api:
        accepted = await api.optim_step(await api.model(), 1)
        await api.result(accepted)
        await api.services.database.write("UPDATE futures SET status = 'pending', body = NULL")
        await api.services.database.write("DELETE FROM operations")
    async with serving(tmp_path) as api:
        assert "server restarted before" in await api.failure(accepted, "server")


def assert_same(left: SampleOutput, right: SampleOutput) -> None:
    assert encode_sample_output(left) == encode_sample_output(right)


async def test_samples_left_by_a_killed_server_are_drawn_with_their_seeds_at_the_next_start(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as api:
        sampler = await api.sampler(await api.session())
        seeded = {"sampling_params": {"max_tokens": 8, "seed": 3}}
        expected = await api.result(await api.sample(sampler, **seeded))
    async with serving(tmp_path, backend=slow(tmp_path, 1000.0)) as api:
        left = [await api.sample(sampler, **seeded), await api.sample(sampler, seq_id=7)]
    async with serving(tmp_path) as api:
        assert_same(await api.result(left[0]), expected)
        again = await api.sample(sampler, seq_id=7)
        assert again["request_id"] == left[1]["request_id"]
        await api.result(left[1])
        rows = await api.services.database.all(
            "SELECT COUNT(*) FROM futures WHERE request IS NOT NULL AND status = 'pending'"
        )
        assert rows[0][0] == 0
        kept = await api.services.futures.sample(sampler, 7)  # for a receipt, as long as the result
        assert kept is not None
        assert json.loads(kept.request)["sampling_params"]["seed"] is not None


async def test_a_seed_drawn_before_a_restart_is_the_one_after_it(tmp_path: Path) -> None:
    async with serving(tmp_path, backend=slow(tmp_path, 1000.0)) as api:
        sampler = await api.sampler(await api.session())
        left = await api.sample(sampler, sampling_params={"max_tokens": 8})
        rows = await api.services.database.all(
            "SELECT request FROM futures WHERE request IS NOT NULL"
        )
        seed = json.loads(rows[0][0])["sampling_params"]["seed"]
    async with serving(tmp_path) as api:
        drawn = await api.result(left)
        seeded = {"sampling_params": {"max_tokens": 8, "seed": seed}}
        assert_same(await api.result(await api.sample(sampler, **seeded)), drawn)


async def test_a_sample_that_streams_nothing_is_tried_again_when_its_engine_ends(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as api:
        sampler = await api.sampler(await api.session())
        seeded = {"sampling_params": {"max_tokens": 8, "seed": 3}}
        expected = await api.result(await api.sample(sampler, **seeded))
        draw, ends = api.services.backend.sample, 0

        async def dying(*args, **options):
            nonlocal ends
            ends += 1
            if ends in (1, 2) or ends > 3:
                raise EngineDied("the engine process ended")
            return await draw(*args, **options)

        api.services.backend.sample = dying  # type: ignore[method-assign]
        assert_same(await api.result(await api.sample(sampler, **seeded)), expected)
        error = await api.failure(await api.sample(sampler), "server")
        assert "3 times" in error
        assert ends == 6


async def test_results_expire(tmp_path: Path) -> None:
    async with serving(tmp_path, result_ttl_s=0.2) as api:
        body = {"session_id": await api.session(), "model_seq_id": 0, "base_model": "fake/tiny"}
        accepted = await api.ok("create_model", **body)
        await async_wait_for(
            "the result is forgotten",
            lambda: api.retrieve(accepted["request_id"]),
            lambda answer: answer.status_code == 404,
        )


async def test_cleanup_forgets_the_named_results_of_the_caller_only(api: Api) -> None:
    bob = api.as_user("bob")
    accepted = await api.optim_step(await api.model(), 1)
    await api.result(accepted)
    names = {"request_ids": [accepted["request_id"]]}
    assert (await bob.ok("cleanup_futures", **names))["num_deleted"] == 0
    assert (await api.retrieve(accepted["request_id"])).status_code == 200
    assert (await api.ok("cleanup_futures", **names))["num_deleted"] == 1
    assert (await api.retrieve(accepted["request_id"])).status_code == 404


async def test_cleanup_of_a_model_leaves_other_models_alone(api: Api) -> None:
    kept, dropped = [await api.optim_step(await api.model(), 1) for _ in range(2)]
    for accepted in (kept, dropped):
        await api.result(accepted)
    await api.ok("cleanup_futures", model_id=dropped["model_id"])
    assert (await api.retrieve(dropped["request_id"])).status_code == 404
    assert (await api.retrieve(kept["request_id"])).status_code == 200


async def test_the_path_form_tells_pending_completed_and_failed(tmp_path: Path) -> None:
    backend = HeldBackend(tmp_path)
    async with serving(tmp_path, backend=backend) as api:
        model_id = await api.model()
        backend.hold()
        good = (await api.optim_step(model_id, 1))["request_id"]
        bad = (await api.forward_backward(model_id, 2, loss_fn="nonsense"))["request_id"]
        assert (await api.get(f"retrieve_future/{good}")).json() == {
            "request_id": good,
            "status": "pending",
            "result": None,
        }
        backend.gate.set()
        done = (await api.get(f"retrieve_future/{good}", wait_s=LIMIT_S)).json()
        assert (done["status"], done["result"]["type"]) == ("completed", "optim_step")
        failed = (await api.http.post(f"/api/v1/retrieve_future/{bad}?wait_s={LIMIT_S}")).json()
        assert (failed["status"], failed["result"]["category"]) == ("failed", "user")


async def test_the_path_form_shows_protobuf_results_as_json(api: Api) -> None:
    session_id = await api.session()
    trained = await api.forward_backward(await api.model(session_id), 1)
    await api.result(trained)
    train = (await api.get(f"retrieve_future/{trained['request_id']}")).json()["result"]
    [fields] = train["loss_fn_outputs"]
    assert fields["logprobs"]["shape"] == [4]
    total = train["metrics"]["loss:sum"] + sum(fields["logprobs"]["data"])
    assert abs(total) < 1e-4
    sampled = await api.sample(await api.sampler(session_id), prompt_logprobs=True)
    await api.result(sampled)
    sample = (await api.get(f"retrieve_future/{sampled['request_id']}")).json()["result"]
    assert len(sample["sequences"][0]["tokens"]) == 2
    assert sample["prompt_logprobs"][0] is None
    assert len(sample["prompt_logprobs"]) == 3


async def test_the_path_form_refuses_unknown_requests(api: Api) -> None:
    assert (await api.get("retrieve_future/train-0")).status_code == 404
    assert (await api.get("retrieve_future/train-0", wait_s="nan")).status_code in (404, 422)


async def test_a_full_disk_ends_no_expiry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expire, num_calls = FuturesStorage.expire, 0

    async def full_at_first(futures: FuturesStorage, ttl_s: float) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise StorageFailed("database or disk is full")
        await expire(futures, ttl_s)

    monkeypatch.setattr(FuturesStorage, "expire", full_at_first)
    async with serving(tmp_path, result_ttl_s=0.2) as api:
        sampler = await api.sampler(await api.session())
        accepted = await api.sample(sampler)
        await async_wait_for(
            "the result is forgotten",
            lambda: api.retrieve(accepted["request_id"]),
            lambda answer: answer.status_code == 410,
        )
