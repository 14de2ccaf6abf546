"""A server that ended without a word: what its clients had been told holds on the next one.

The end of a process is a copy of its data folder while nothing is being written; the next server
starts on that copy, with a backend that remembers nothing. The first one goes on, and says what
would have come without the end.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.api.harness import Api, serving, wire_datum
from tests.waiting import async_wait_for
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.config import Config
from tinkercloud.core import outcome_recorder
from tinkercloud.core.types import AdamParams, TrainBatch, TrainOutput
from tinkercloud.errors import StorageFailed, UserError
from tinkercloud.services.recovery import snapshots
from tinkercloud.storage.futures import FuturesStorage

ADAM = {"learning_rate": 0.05}


@asynccontextmanager
async def after_its_end(api: Api, folder: Path, target: Path, **options: Any) -> AsyncIterator[Api]:
    """The next server on what the folder has now, for the same user."""
    shutil.copytree(folder, target)
    async with serving(target, **options) as other:
        yield Api(other.app, api.keys, api.key)


async def train(api: Api, model_id: str, first: int, steps: int = 2) -> int:
    """Steps of two passes each; the next number."""
    for step in range(steps):
        for part in range(2):
            datum = wire_datum((1 + step, 2, 3 + part, 4))
            await api.result(await api.forward_backward(model_id, first, [datum]))
            first += 1
        await api.result(await api.optim_step(model_id, first, **ADAM))
        first += 1
    return first


async def goes_on(api: Api, model_id: str, number: int) -> list[Any]:
    """Results of what a client asks next: of a step on the gradient that is there, too."""
    step = await api.result(await api.optim_step(model_id, number, **ADAM))
    passed = await api.result(await api.forward_backward(model_id, number + 1, forward_only=True))
    logprobs = passed.outputs[0]["logprobs"]
    return [step["metrics"]["unclipped_grad_l2:mean"], passed.metrics, logprobs.tolist()]


@pytest.fixture(params=["operations alone", "snapshots"])
def often(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether there are snapshots: after every operation, or never."""
    is_often = request.param == "snapshots"
    monkeypatch.setattr(snapshots, "SHARE", 1e9 if is_often else 0.0)
    return is_often


async def save(api: Api, model_id: str, number: int) -> dict[str, Any]:
    return await api.ok("save_weights", model_id=model_id, seq_id=number, path="one")


async def test_a_model_goes_on_as_if_nothing_had_happened(tmp_path: Path, often: bool) -> None:
    async with serving(tmp_path / "a") as api:
        model_id = await api.model()
        number = await train(api, model_id, 1)
        await api.result(await api.forward_backward(model_id, number, [wire_datum((7, 8, 9))]))
        await api.services.snapshots.settled()
        async with after_its_end(api, tmp_path / "a", tmp_path / "b") as next_api:
            again = await goes_on(next_api, model_id, number + 1)
        assert again == await goes_on(api, model_id, number + 1)
        assert (api.services.snapshots.stats()["snapshots"] > 0) is often
        assert bool(list((tmp_path / "a/recovery").glob("*/snapshot-*"))) is often
        debt = next(
            line
            for line in (await api.as_user("eve").http.get("/metrics")).text.splitlines()
            if line.startswith("tinkercloud_replay_debt_seconds")
        )
        assert often or float(debt.split()[1]) > 0


async def test_published_weights_and_their_samplers_survive(tmp_path: Path, often: bool) -> None:
    async with serving(tmp_path / "a") as api:
        model_id = await api.model()
        number = await train(api, model_id, 1, steps=1)
        accepted = await api.ok(
            "save_weights_for_sampler",
            model_id=model_id,
            seq_id=number,
            sampling_session_seq_id=5,
        )
        sampler = (await api.result(accepted))["sampling_session_id"]
        await train(api, model_id, number + 1)  # the model goes on, the sampler does not
        await api.services.snapshots.settled()
        async with after_its_end(api, tmp_path / "a", tmp_path / "b") as next_api:
            again = await next_api.result(await next_api.sample(sampler, seed=3))
        expected = await api.result(await api.sample(sampler, seed=3))
        assert np.array_equal(again.sequences[0].tokens, expected.sequences[0].tokens)
        assert np.array_equal(again.sequences[0].logprobs, expected.sequences[0].logprobs)


@pytest.mark.parametrize("is_set_back", [False, True])
async def test_acknowledged_operations_run_after_the_end(tmp_path: Path, is_set_back: bool) -> None:
    """They are on record and have not begun: the backend is slow. is_set_back: the clock is,
    between any two of them."""
    async with serving(tmp_path / "a") as api:
        model_id = await api.model()
        number = await train(api, model_id, 1)
        gate = asyncio.Event()
        hold_passes(api, gate)
        waiting = [
            await api.forward_backward(model_id, number, [wire_datum((4, 5, 6))]),
            await api.forward_backward(model_id, number + 1, loss_fn="no such loss"),
            await api.optim_step(model_id, number + 2, **ADAM),
        ]
        if is_set_back:
            await api.services.database.write(
                "UPDATE futures SET created_at = -created_at WHERE status = 'pending'"
            )
        async with after_its_end(api, tmp_path / "a", tmp_path / "b") as next_api:
            again = [await next_api.result(accepted) for accepted in waiting]
            assert again[1]["category"] == "user"
            last = await goes_on(next_api, model_id, number + 3)
        gate.set()
        results = [await api.result(accepted) for accepted in waiting]
        assert again[0].metrics == results[0].metrics
        assert again[1:] == results[1:]
        assert last == await goes_on(api, model_id, number + 3)


def hold_passes(api: Api, gate: asyncio.Event) -> asyncio.Event:
    """Until the gate is set. What it gives is set once a pass has come to it."""
    backend = api.services.backend
    forward_backward, is_held = backend.forward_backward, asyncio.Event()

    async def held(*args: Any) -> Any:
        is_held.set()
        await gate.wait()
        return await forward_backward(*args)

    backend.forward_backward = held  # type: ignore[method-assign]
    return is_held


async def test_what_is_refused_is_refused_with_its_acknowledgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no end of the process between the two: nothing is recorded after the first."""

    async def full(self: FuturesStorage, *args: Any) -> None:
        raise StorageFailed("database or disk is full")

    async with serving(tmp_path / "a") as api:
        with monkeypatch.context() as patched:
            patched.setattr(FuturesStorage, "finish", full)
            accepted = await api.forward_backward("nobody:train:0", 1)
            await asyncio.sleep(0.05)
            shutil.copytree(tmp_path / "a", tmp_path / "b")
        keys = api.keys
    async with serving(tmp_path / "b") as server:
        text = await Api(server.app, keys, keys["ann"]).failure(accepted)
    assert "nobody:train:0" in text


async def test_a_deleted_model_is_kept_until_its_last_outcome_is_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when its last operation ends, and the process ends before there is room."""
    is_full, finish = asyncio.Event(), FuturesStorage.finish

    async def full(self: FuturesStorage, *args: Any) -> None:
        if is_full.is_set():
            raise StorageFailed("database or disk is full")
        await finish(self, *args)

    monkeypatch.setattr(FuturesStorage, "finish", full)
    monkeypatch.setattr(outcome_recorder, "RECORD_AGAIN_S", 0.05)
    async with serving(tmp_path / "a", archive_bytes=0) as api:
        model_id = await api.model()
        number = await train(api, model_id, 1)
        is_full.set()
        last = await api.forward_backward(model_id, number)
        await async_wait_for(
            "its outcome is late",
            lambda: api.services.tasks.delay_of(last["request_id"]),
            lambda delay: delay is not None,
        )
        await api.ok("delete_model", model_id=model_id)
        await asyncio.sleep(0.1)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        is_full.clear()
        expected = await api.result(last)
        await api.services.models.freed()
        assert not list((tmp_path / "a/recovery").glob("*"))
        keys = api.keys
    async with serving(tmp_path / "b", archive_bytes=0) as server:
        api = Api(server.app, keys, keys["ann"])
        assert (await api.result(last)).metrics == expected.metrics
        await api.services.models.freed()
        assert not list((tmp_path / "b/recovery").glob("*"))


async def test_a_stop_lets_what_runs_end_and_leaves_the_rest_for_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "SHARE", 0.0)  # none is due
    async with serving(tmp_path) as api:
        model_id = await api.model()
        number = await train(api, model_id, 1)
        gate = asyncio.Event()
        is_held = hold_passes(api, gate)
        running = await api.forward_backward(model_id, number)
        queued = await api.optim_step(model_id, number + 1, **ADAM)
        await is_held.wait()
        stopping = asyncio.create_task(api.services.stop_work())
        await asyncio.sleep(0.05)
        assert not stopping.done()
        gate.set()
        await stopping
        database, keys = api.services.database, api.keys
        (snapshot,) = await database.all("SELECT position FROM snapshots")
        assert snapshot["position"] == 1 + number  # after the creation and all passes and steps
        rows = await database.all("SELECT request_id FROM futures WHERE status = 'pending'")
        assert [row["request_id"] for row in rows] == [queued["request_id"]]
    async with serving(tmp_path) as server:
        api = Api(server.app, keys, keys["ann"])
        assert (await api.result(running)).metrics
        assert "metrics" in await api.result(queued)


class Picky(FakeBackend):
    """Refuses steps of a learning rate as if their gradient were not finite: it is dropped."""

    def __init__(self) -> None:
        super().__init__(Config(backend="fake"))

    async def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        metrics = await super().optim_step(
            model_id, replace(params, learning_rate=params.learning_rate % 1)
        )
        if params.learning_rate >= 1:
            raise UserError("the gradient is not finite")
        return metrics


async def test_a_gradient_that_was_not_finite_is_dropped_again(tmp_path: Path) -> None:
    async with serving(tmp_path / "a", backend=Picky()) as api:
        model_id = await api.model()
        await api.result(await api.forward_backward(model_id, 1))
        await api.failure(await api.optim_step(model_id, 2, learning_rate=1.0))
        await api.result(await api.forward_backward(model_id, 3, [wire_datum((7, 8))]))
        end = after_its_end(api, tmp_path / "a", tmp_path / "b", backend=Picky())
        async with end as next_api:
            again = await goes_on(next_api, model_id, 4)
        assert again == await goes_on(api, model_id, 4)


async def test_a_loaded_checkpoint_may_be_deleted(tmp_path: Path, often: bool) -> None:
    async with serving(tmp_path / "a") as api:
        session = await api.session()
        model_id = await api.model(session)
        number = await train(api, model_id, 1)
        path = (await api.result(await save(api, model_id, number)))["path"]
        accepted = await api.ok(
            "load_weights", session_id=session, model_seq_id=1, path=path, optimizer=True
        )
        loaded = (await api.result(accepted))["model_id"]
        await train(api, loaded, 1, steps=1)
        url = f"/api/v1/training_runs/{model_id}/checkpoints/weights/one"
        assert (await api.http.delete(url)).status_code == 204
        await api.services.snapshots.settled()
        async with after_its_end(api, tmp_path / "a", tmp_path / "b") as next_api:
            again = await goes_on(next_api, loaded, 4)
        assert again == await goes_on(api, loaded, 4)


async def test_a_save_that_was_made_but_not_answered_is_found_again(tmp_path: Path) -> None:
    async with serving(tmp_path / "a") as api:
        model_id = await api.model()
        accepted = await save(api, model_id, 1)
        path = (await api.result(accepted))["path"]
        request_id = accepted["request_id"]
        await api.services.database.write(
            "UPDATE futures SET status = 'pending', body = NULL WHERE request_id = ?", request_id
        )
        await api.services.database.write(
            "INSERT INTO operations (request_id, user, model_id, kind, seq_id, request)"
            " SELECT request_id, user, model_id, kind, seq_id, ? FROM futures WHERE request_id = ?",
            *(f'{{"model_id": "{model_id}", "path": "one"}}'.encode(), request_id),
        )
        async with after_its_end(api, tmp_path / "a", tmp_path / "b") as next_api:
            assert (await next_api.result(accepted))["path"] == path
            assert "exists" in await next_api.failure(await save(next_api, model_id, 2))


async def test_a_run_says_since_when_it_is_not_bit_exact(
    tmp_path: Path, often: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine goes on with it, and then a third one: the first change counts."""

    async def metadata(api: Api) -> dict[str, str]:
        return (await api.get(f"training_runs/{model_id}")).json()["user_metadata"]

    async with serving(tmp_path) as api:
        model_id = await api.model(user_metadata={"mine": "1"})
        number = await train(api, model_id, 1, steps=2)
        assert await metadata(api) == {"mine": "1"}
        keys = api.keys
    for machine in ("another", "a third"):
        monkeypatch.setattr(FakeBackend, "numerics", lambda self, name=machine: name)
        async with serving(tmp_path) as server:
            api = Api(server.app, keys, keys["ann"])
            number = await train(api, model_id, number, steps=1)
            assert await metadata(api) == {"mine": "1", "not_bit_exact_since": "step 2"}


async def test_what_comes_out_otherwise_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that computes other bits: served results stay, and /metrics says how far off."""

    async def deviation(api: Api) -> float:
        lines = (await api.as_user("eve").http.get("/metrics")).text.splitlines()
        (line,) = [each for each in lines if each.startswith("tinkercloud_replay_deviation_nats")]
        return float(line.split()[1])

    exact = FakeBackend.forward_backward

    async def off(self: FakeBackend, model_id: str, batch: TrainBatch) -> TrainOutput:
        output = await exact(self, model_id, batch)
        moved = tuple({n: v + np.float32(0.125) for n, v in o.items()} for o in output.outputs)
        return replace(output, outputs=moved)

    monkeypatch.setattr(snapshots, "SHARE", 0.0)
    async with serving(tmp_path / "a") as api:
        model_id = await api.model()
        await train(api, model_id, 1, steps=1)
        assert await deviation(api) == 0
        monkeypatch.setattr(FakeBackend, "forward_backward", off)
        async with after_its_end(api, tmp_path / "a", tmp_path / "b") as next_api:
            services = next_api.services
            await services.recovery.ensure(services.tasks.lanes, "ann", model_id)
            assert await deviation(next_api) == pytest.approx(0.125)


async def test_a_session_that_ends_leaves_nothing_without_an_archive(
    tmp_path: Path, often: bool
) -> None:
    async with serving(tmp_path / "a", archive_bytes=0) as api:
        session = await api.session()
        model_id = await api.model(session)
        await train(api, model_id, 1)
        await api.ok(f"sessions/{session}/finish", reason={"type": "success"}, detail=None)
        await api.services.models.freed()
        for table in ("operations", "snapshots", "kept_versions", "runs", "numerics"):
            assert not await api.services.database.all(f"SELECT * FROM {table}"), table
        assert not list((tmp_path / "a/recovery").glob("*"))


async def test_a_refused_step_has_no_effect_after_an_end_either(
    tmp_path: Path, often: bool
) -> None:
    async with serving(tmp_path / "a") as api:
        session_id = await api.session()
        refused, undisturbed = await api.model(session_id, 0), await api.model(session_id, 1)
        await train(api, refused, 1)
        number = await train(api, undisturbed, 1)
        for model_id in (refused, undisturbed):
            await api.result(await api.forward_backward(model_id, number))
        step = await api.optim_step(refused, number + 1, learning_rate=1e30, weight_decay=1e30)
        assert "the model is as before it" in await api.failure(step)
        async with after_its_end(api, tmp_path / "a", tmp_path / "b") as other:
            there = await goes_on(other, refused, number + 2)
        assert there == await goes_on(api, undisturbed, number + 1)


async def test_a_number_with_another_body_is_an_error_and_the_same_body_is_the_same_request(
    tmp_path: Path,
) -> None:
    other_data = [wire_datum((9, 8, 7))]
    async with serving(tmp_path / "a") as api:
        session_id = await api.session()
        model_id = await api.model(session_id, 0)
        first = await api.forward_backward(model_id, 1)
        await api.result(first)
        step = await api.optim_step(model_id, 2, **ADAM)
        await api.result(step)
        sampler = await api.sampler(session_id)
        sample = await api.sample(sampler, seq_id=3)
        await api.result(sample)
        before = await api.result(await api.forward_backward(model_id, 3, forward_only=True))
        async with after_its_end(api, tmp_path / "a", tmp_path / "b") as other:
            for each in (api, other):
                again = await each.forward_backward(model_id, 1)
                assert again["request_id"] == first["request_id"]
                repeated = await each.optim_step(model_id, 2, **ADAM)
                assert repeated["request_id"] == step["request_id"]
                assert (await each.sample(sampler, seq_id=3))["request_id"] == sample["request_id"]
                for refused in (
                    await each.forward_backward(model_id, 1, other_data),
                    await each.optim_step(model_id, 2, learning_rate=0.5),
                    await each.sample(sampler, seq_id=3, num_samples=2),
                ):
                    assert "seq_id" in (text := await each.failure(refused))
                    assert "was taken by another request" in text
                now = await each.forward_backward(model_id, 4, forward_only=True)
                assert (await each.result(now)).metrics == before.metrics


async def test_a_save_that_is_sent_again_with_the_next_sampler_number_is_the_same_save(
    tmp_path: Path,
) -> None:
    """The official client counts at each try (`_send_request` of 0.38): the answer to the first may
    be what a kill took from it."""
    async with serving(tmp_path / "a") as api:
        session_id = await api.session()
        model_id = await api.model(session_id, 0)
        save = {"model_id": model_id, "seq_id": 1}

        async def sent(each: Api, number: int, **more: str) -> dict[str, Any]:
            body = {**save, "sampling_session_seq_id": number, **more}
            return await each.ok("save_weights_for_sampler", **body)

        first = await sent(api, 0)
        saved = await api.result(first)
        assert saved["sampling_session_id"] == f"{session_id}:sample:0"
        async with after_its_end(api, tmp_path / "a", tmp_path / "b") as other:
            for each in (api, other):
                again = await sent(each, 1)
                assert again["request_id"] == first["request_id"]
                assert await each.result(again) == saved
                refused = await sent(each, 2, kind="inflight")
                assert "was taken by another request" in await each.failure(refused)


@pytest.mark.parametrize("route", ["create_session", "create_model"])
async def test_metadata_that_is_not_finite_is_refused(tmp_path: Path, route: str) -> None:
    async with serving(tmp_path / "a") as api:
        body = '{"user_metadata": {"a": [NaN]}, "tags": [], "sdk_version": "1"'
        if route == "create_model":
            body += f', "session_id": "{await api.session()}", "model_seq_id": 0'
            body += ', "base_model": "fake/tiny"'
        headers = {"content-type": "application/json"}
        response = await api.http.post(f"/api/v1/{route}", content=body + "}", headers=headers)
    assert response.status_code == 422
    assert "user_metadata['a']" in response.text
