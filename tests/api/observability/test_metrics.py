"""`/metrics`: what operations did, by kind, user and outcome, and who may read it."""

import asyncio
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.api.harness import Api, serving
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.config import Config
from tinkercloud.storage.keys import KeyStore

Values = dict[tuple[str, ...], float]


class Operator:
    """Reads `/metrics` with a key of the user "metrics"."""

    def __init__(self, api: Api, data_dir: Path):
        store = KeyStore(data_dir)
        self.api = Api(api.app, api.keys, store.add("metrics"))
        store.close()

    async def values(self, name: str, *labels: str) -> Values:
        """Of the samples of this name, by the values of these labels."""
        return await values_of(self.api, name, *labels)


async def values(api: Api, name: str, *labels: str) -> Values:
    """As an administrator reads them."""
    return await values_of(api.as_user("eve"), name, *labels)


async def values_of(api: Api, name: str, *labels: str) -> Values:
    answer = await api.http.get("/metrics")
    assert answer.status_code == 200
    return {
        tuple(sample.labels[label] for label in labels): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.name == name
    }


@pytest.fixture
def operator(api: Api, tmp_path: Path) -> Operator:
    return Operator(api, tmp_path / "data")


async def test_operations_are_counted_by_kind_user_and_outcome(
    api: Api, operator: Operator
) -> None:
    model_id = await api.model()
    await api.train(model_id, 1)
    await api.failure(await api.forward_backward(model_id, 3, loss_fn="no_such_loss"))
    bob = api.as_user("bob")
    await bob.result(await bob.sample(await bob.sampler(await bob.session())))
    ended = await operator.values("tinkercloud_operations_total", "kind", "user", "outcome")
    assert ended == {
        ("CreateModel", "ann", "completed"): 1,
        ("ForwardBackward", "ann", "completed"): 1,
        ("ForwardBackward", "ann", "failed_user"): 1,
        ("OptimStep", "ann", "completed"): 1,
        ("Sample", "bob", "completed"): 1,
    }


async def test_the_time_of_each_phase_adds_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = FakeBackend.sample

    async def slow(self: FakeBackend, *args, **options):
        await asyncio.sleep(0.05)
        return await sampled(self, *args, **options)

    monkeypatch.setattr(FakeBackend, "sample", slow)
    async with serving(tmp_path) as api:
        sampler_id = await api.sampler(await api.session())
        began = time.monotonic()
        for _ in range(3):
            await api.result(await api.sample(sampler_id))
        took_s = time.monotonic() - began
        name = "tinkercloud_operation_phase_seconds"
        counts = await values(api, f"{name}_count", "kind", "phase")
        sums = await values(api, f"{name}_sum", "kind", "phase")
    assert {counts["Sample", phase] for phase in ("waiting", "running", "recording")} == {3}
    assert sums["Sample", "running"] >= 0.15
    assert all(seconds >= 0 for seconds in sums.values())
    assert sum(seconds for (kind, _), seconds in sums.items() if kind == "Sample") <= took_s


async def test_what_waits_and_what_runs_is_the_depth_of_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = asyncio.Event()

    async def held(self: FakeBackend, *args, **options):
        await go_on.wait()
        return {}

    monkeypatch.setattr(FakeBackend, "optim_step", held)
    async with serving(tmp_path) as api:
        model_id = await api.model()
        steps = [await api.optim_step(model_id, number) for number in (1, 2, 3)]
        depth = await values(api, "tinkercloud_queue_operations", "kind", "phase")
        assert depth == {("OptimStep", "running"): 1, ("OptimStep", "waiting"): 2}
        oldest = await values(api, "tinkercloud_queue_oldest_seconds", "kind")
        assert 0 < oldest["OptimStep",] < 10
        assert await values(api, "tinkercloud_requests_pending") == {(): 3}
        go_on.set()
        for step in steps:
            await api.result(step)
        assert not await values(api, "tinkercloud_queue_operations", "kind", "phase")


async def test_tokens_are_counted_as_usage_is(api: Api, operator: Operator) -> None:
    model_id = await api.model()
    await api.train(model_id, 1)  # four tokens
    await api.result(await api.sample(await api.sampler(await api.session())))
    tokens = await operator.values("tinkercloud_tokens_total", "user", "base_model", "kind")
    assert tokens == {
        ("ann", "fake/tiny", "training"): 4,
        ("ann", "fake/tiny", "prefill"): 3,
        ("ann", "fake/tiny", "sample"): 2,
    }


async def test_a_cancelled_sample_is_counted_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def for_ever(self: FakeBackend, *args, **options):
        await asyncio.sleep(60)

    monkeypatch.setattr(FakeBackend, "sample", for_ever)
    async with serving(tmp_path) as api:
        accepted = await api.sample(await api.sampler(await api.session()))
        assert (await api.post("cancel_future", **accepted)).status_code == 200
        ended = await values(api, "tinkercloud_operations_total", "kind", "outcome")
    assert ended["Sample", "cancelled"] == 1


async def test_a_sample_whose_session_ends_is_counted_as_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def for_ever(self: FakeBackend, *args, **options):
        await asyncio.sleep(60)

    monkeypatch.setattr(FakeBackend, "sample", for_ever)
    async with serving(tmp_path) as api:
        session = await api.session()
        accepted = await api.sample(await api.sampler(session))
        await api.ok(f"sessions/{session}/finish", reason={"type": "success"}, detail=None)
        assert "session has ended" in await api.failure(accepted)
        ended = await values(api, "tinkercloud_operations_total", "kind", "outcome")
    assert ended == {("Sample", "cancelled"): 1}


async def test_a_user_sees_own_numbers_only(api: Api, operator: Operator) -> None:
    await api.model()
    bob = api.as_user("bob")
    await bob.model()
    await bob.result(await bob.sample(await bob.sampler(await bob.session())))
    for user in ("ann", "bob", "reader"):
        text = (await api.as_user(user).http.get("/metrics")).text
        name = "ann" if user == "reader" else user
        samples = [line for line in text.splitlines() if not line.startswith("#")]
        assert samples
        assert all(f'user="{name}"' in line for line in samples), samples
    ended = await operator.values("tinkercloud_operations_total", "user")
    assert set(ended) == {("ann",), ("bob",)}


async def test_without_a_key_there_are_no_metrics(api: Api) -> None:
    assert (await Api(api.app, api.keys, "").http.get("/metrics")).status_code == 401


async def test_two_servers_of_one_process_count_apart(tmp_path: Path) -> None:
    async with serving(tmp_path / "a") as first, serving(tmp_path / "b") as second:
        await first.model()
        assert await values(first, "tinkercloud_operations_total", "kind") == {("CreateModel",): 1}
        assert not await values(second, "tinkercloud_operations_total", "kind")


class Pooled(FakeBackend):
    """As a backend of many pools and drafts reports."""

    def stats(self) -> dict[str, float | int | str]:
        return {"backend": "pooled", "a/b: phase_ms": 1.5, "c: phase_ms": 2}

    def metrics(self) -> list[str]:
        return [
            "# HELP tinkercloud_speculation_rounds_total Rounds.",
            "# TYPE tinkercloud_speculation_rounds_total counter",
            'tinkercloud_speculation_rounds_total{kind="plain"} 3.0',
        ]


async def test_pools_are_a_label_and_lines_of_the_engine_pass_as_they_are(tmp_path: Path) -> None:
    async with serving(tmp_path, backend=Pooled(Config(backend="fake"))) as api:
        pools = await values(api, "tinkercloud_phase_ms", "pool")
        text = (await api.as_user("eve").http.get("/metrics")).text
    assert pools == {("a/b",): 1.5, ("c",): 2}
    for line in Pooled(Config(backend="fake")).metrics():
        assert line in text.splitlines()


async def test_memory_and_open_files_of_the_process_are_there(api: Api) -> None:
    assert (await values(api, "process_resident_memory_bytes"))[()] > 1e6
    assert (await values(api, "process_open_fds"))[()] > 1
