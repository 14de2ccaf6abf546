"""Models and published weights that nobody uses go to the disk, and come back the same bits."""

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.api.harness import Api, serving, wire_datum
from tests.api.recovery.test_recovery import goes_on, hold_passes, train
from tests.waiting import async_wait_for
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.config import Config
from tinkercloud.errors import MemoryShort
from tinkercloud.services.recovery import idle_models, published_weights, recovery

NOW = 0.0


def memory(api: Api) -> tuple[int, int]:
    """Models and versions that the backend holds."""
    stats = api.services.backend.stats()
    return int(stats["num_models"]), int(stats["num_versions"])


async def published(api: Api, model_id: str, number: int, **fields: Any) -> str:
    body = {"model_id": model_id, "seq_id": number, "sampling_session_seq_id": number}
    accepted = await api.ok("save_weights_for_sampler", **body, **fields)
    return (await api.result(accepted))["sampling_session_id"]


async def drawn(api: Api, sampler: str, seq_id: int) -> list[Any]:
    sampled = await api.result(
        await api.sample(
            sampler, seq_id=seq_id, sampling_params={"max_tokens": 4, "temperature": 1.0, "seed": 7}
        )
    )
    return [sampled.sequences[0].tokens.tolist(), sampled.sequences[0].logprobs.tolist()]


async def test_a_model_that_was_put_away_goes_on_to_the_bit(tmp_path: Path) -> None:
    """Its gradient and the optimizer's moments included: twins, one of which stays."""
    async with serving(tmp_path) as api:
        session = await api.session()
        lora = {"lora_config": {"rank": 4, "seed": 1}}
        ids = [await api.model(session, number, **lora) for number in range(2)]
        for model_id in ids:
            number = await train(api, model_id, 1)
            await api.result(await api.forward_backward(model_id, number, [wire_datum((7, 8, 9))]))
        away = ("ann", ids[0])
        assert await api.services.idle.offload(away)
        assert memory(api) == (1, 0)
        assert not await api.services.idle.offload(away)
        first = await goes_on(api, ids[0], number + 1)
        assert first == await goes_on(api, ids[1], number + 1)
        assert memory(api) == (2, 0)
        # again, with nothing that changed it meanwhile: its snapshot will do
        assert await api.services.idle.offload(away)
        taken = api.services.snapshots.stats()["snapshots"]
        assert await api.result(await api.forward_backward(ids[0], number + 3, forward_only=True))
        assert await api.services.idle.offload(away)
        assert api.services.snapshots.stats()["snapshots"] == taken
        assert await goes_on(api, ids[0], number + 4) == await goes_on(api, ids[1], number + 3)


@pytest.mark.parametrize("kind", ["snapshot", "inflight"])
async def test_published_weights_go_to_the_disk_and_sample_the_same(
    tmp_path: Path, kind: str
) -> None:
    async with serving(tmp_path) as api:
        model_id = await api.model()
        number = await train(api, model_id, 1, steps=1)
        sampler = await published(api, model_id, number, kind=kind)
        expected = await drawn(api, sampler, 0)
        await api.result(await api.forward_backward(model_id, number + 1))
        await api.result(await api.optim_step(model_id, number + 2, learning_rate=9.0))
        base = await api.sampler(await api.session())
        await drawn(api, base, 0)
        assert memory(api) == (1, 2)
        await api.services.idle.offload_unused(NOW)
        assert memory(api) == (0, 0)
        assert await drawn(api, sampler, 1) == expected
        if kind == "snapshot":
            assert memory(api) == (0, 1), "its model is not needed"
        later = await published(api, model_id, number + 3, kind=kind)
        assert await drawn(api, later, 0) != expected
        assert await drawn(api, sampler, 2) == (
            expected if kind == "snapshot" else await drawn(api, later, 1)
        )


async def test_what_is_unused_goes_by_itself_and_what_runs_stays(tmp_path: Path) -> None:
    async with serving(tmp_path, idle_model_s=0.2) as api:
        model_id = await api.model()
        number = await train(api, model_id, 1)
        gate = asyncio.Event()
        hold_passes(api, gate)
        waiting = await api.forward_backward(model_id, number)
        await asyncio.sleep(0.5)
        assert memory(api) == (1, 0)
        gate.set()
        await api.result(waiting)
        await async_wait_for(
            "nothing is in memory", lambda: memory(api), lambda counts: counts == (0, 0)
        )
        metrics = (await api.as_user("eve").http.get("/metrics")).text
        # More than once where this machine was busy for a fifth of a second before.
        assert re.search(r"^tinkercloud_models_put_away_total [1-9]", metrics, re.M)
        assert await api.loss(model_id, number + 1) > 0


class FullDisk(FakeBackend):
    is_full = True

    async def write_state(self, copy: int, directory: Path) -> Any:
        if self.is_full:
            raise OSError(28, "No space left on device")
        return await super().write_state(copy, directory)

    async def write_version(self, version: str, directory: Path) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        await super().write_version(version, directory)


async def test_a_model_stays_while_the_disk_has_no_room(tmp_path: Path) -> None:
    backend = FullDisk(Config(backend="fake"))
    async with serving(tmp_path, backend=backend) as api:
        model_id = await api.model()
        await train(api, model_id, 1)
        assert not await api.services.idle.offload(("ann", model_id))
        assert memory(api) == (1, 0)
        backend.is_full = False
        assert await api.services.idle.offload(("ann", model_id))
        assert memory(api) == (0, 0)


async def test_tokens_of_weights_that_were_put_away_are_known_as_on_policy(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as api:
        model_id = await api.model()
        sampler = await published(api, model_id, 1)
        await api.services.idle.offload_unused(NOW)
        tokens, logprobs = await drawn(api, sampler, 0)
        sequence = [1, 2, 3, *tokens]
        is_sampled = [False] * 2 + [True] * len(tokens)
        datum = wire_datum(
            sequence[:-1],
            target_tokens=np.array(sequence[1:]),
            weights=0,
            logprobs=np.array([0.0, 0.0, *logprobs], np.float32),
            advantages=np.array(is_sampled, np.float32),
        )
        await api.forward_backward(model_id, 2, [datum], "importance_sampling")
        step = await api.result(await api.optim_step(model_id, 3, learning_rate=0.1))
        assert step["metrics"]["on_policy_tokens:sum"] == len(tokens)


async def test_published_weights_have_a_bound_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who sampled longest ago is told that the weights went; what is in memory stays."""
    monkeypatch.setattr(published_weights, "SPARED_S", -1.0)
    async with serving(tmp_path, published_bytes=1) as api:
        model_id = await api.model()
        first, second = [await published(api, model_id, number) for number in (1, 2)]
        await api.services.idle.offload_unused(NOW)
        folder = tmp_path / "recovery" / model_id
        assert len(list(folder.glob("version-*"))) == 2
        expected = await drawn(api, second, 0)
        await api.services.published_weights.keep_within()
        assert len(list(folder.glob("version-*"))) == 1
        assert "published_bytes" in await api.failure(await api.sample(first), "server")
        assert await drawn(api, second, 1) == expected
        monkeypatch.setattr(published_weights, "SPARED_S", 600.0)
        await api.services.idle.offload_unused(NOW)
        await api.services.published_weights.keep_within()
        assert await drawn(api, second, 2) == expected, "it was used just now"
        assert await drawn(api, await published(api, model_id, 3), 0) == expected


class OneModelBackend(FakeBackend):
    """Has room for the weights of a single model."""

    def use_for_room(self, make_room: Any) -> None:
        self._make_room = make_room

    async def _require_room(self, model_id: str) -> None:
        while self._models.keys() - {model_id}:
            if not await self._make_room():
                raise MemoryShort("a model", 2**31, 2**29)

    async def create_model(self, model_id: str, *args: Any) -> None:
        await self._require_room(model_id)
        await super().create_model(model_id, *args)

    async def restore_state(self, model_id: str, *args: Any) -> None:
        await self._require_room(model_id)
        await super().restore_state(model_id, *args)


async def test_models_take_turns_in_memory_and_what_is_in_use_is_not_pushed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_models, "PAUSE_S", 0.0)
    monkeypatch.setattr(recovery, "MAX_FAILURES", 2)
    backend = OneModelBackend(Config(backend="fake"))
    async with serving(tmp_path, backend=backend) as api:
        session = await api.session()
        lora = {"lora_config": {"rank": 4, "seed": 1}}
        ids = [await api.model(session, number, **lora) for number in range(3)]
        for step in range(2):
            for model_id in ids:
                await train(api, model_id, 1 + 3 * step, steps=1)
                assert memory(api) == (1, 0)
        results = [await goes_on(api, model_id, 7) for model_id in ids]
        assert results[0] == results[1] == results[2]

        gate = asyncio.Event()
        is_held = hold_passes(api, gate)
        waiting = await api.forward_backward(ids[0], 9)
        await is_held.wait()
        body = {"session_id": session, "model_seq_id": 3, "base_model": "fake/tiny"}
        text = await api.failure(await api.ok("create_model", **body))
        assert text.startswith("a model needs 2.00 GiB of memory, and 512.0 MiB are left here")
        late = await api.optim_step(ids[1], 9, learning_rate=0.1)
        text = await api.failure(late, "server")
        assert "is kept on the server's disk" in text
        gate.set()
        await api.result(waiting)
        # the step that found no room did not run
        step = await api.result(await api.optim_step(ids[1], 10, learning_rate=0.1))
        assert step["metrics"]["unclipped_grad_l2:mean"] == 0.0
        assert await api.services.idle.offload(("ann", ids[1]))
        assert await api.loss(ids[1], 11) == await api.loss(ids[1], 12)


async def test_a_day_of_scripts_leaves_models_memory_and_files_as_they_were(
    tmp_path: Path,
) -> None:
    """Each makes a model, trains, publishes, samples; some say that they have finished, some are
    deleted by hand, some vanish: these stay on the disk alone, for their owners."""
    times = {"idle_model_s": 0.2, "session_ttl_s": 0.4}
    times["result_ttl_s"] = 3.0  # in which each is fetched
    async with serving(tmp_path, archive_bytes=0, **times) as api:
        vanished = []
        for number in range(24):
            session = await api.session()
            model_id = await api.model(session)
            seq_id = await train(api, model_id, 1, steps=1)
            sampler = await published(api, model_id, seq_id)
            await drawn(api, sampler, 0)
            if number % 3 == 0:
                vanished.append((model_id, sampler))
            else:
                await api.ok(f"sessions/{session}/finish", reason={"type": "success"})

        async def left() -> tuple[int, ...]:
            return *memory(api), await num_results(api)

        await async_wait_for("nothing is left", left, lambda counts: counts == (0, 0, 0))
        await api.services.models.freed()
        kept = {path.name for path in (tmp_path / "recovery").iterdir()}
        assert kept == {model_id for model_id, _ in vanished}
        first, *others = [await drawn(api, sampler, 5) for _, sampler in vanished]
        assert all(each == first for each in others)
        for model_id, _ in vanished:
            await api.ok(
                f"sessions/{model_id.partition(':')[0]}/finish", reason={"type": "success"}
            )
        await api.services.models.freed()
        assert memory(api) == (0, 0)
        assert not list((tmp_path / "recovery").iterdir())


async def num_results(api: Api) -> int:
    row = await api.services.database.one("SELECT COUNT(*) AS num FROM futures")
    assert row is not None
    return row["num"]
