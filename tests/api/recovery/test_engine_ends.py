"""An engine that ends while a server goes on is a delay to its clients, and nothing else."""

import asyncio
import pickle
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.api.harness import Api, serving
from tests.api.recovery.test_idle_models import drawn, published
from tests.api.recovery.test_recovery import ADAM, goes_on, save, train
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.config import Config
from tinkercloud.core.types import (
    FromCheckpoint,
    LoraSpec,
    OnTokens,
    SampleOutput,
    SampleRequest,
    StateCost,
    TrainBatch,
    TrainOutput,
    WeightsSource,
)
from tinkercloud.errors import EngineDied
from tinkercloud.services.recovery import snapshots
from tinkercloud.storage.database import Database


class Mortal(FakeBackend):
    """Ends at passes of models that `ends` has a number for, so many times, and begins anew without
    its models."""

    def __init__(self) -> None:
        super().__init__(Config(backend="fake"))
        self.num_ends = 0
        self.ends: dict[str, int] = {}

    def incarnation(self) -> int | None:
        return self.num_ends

    async def forward_backward(self, model_id: str, batch: TrainBatch) -> TrainOutput:
        if self.ends.get(model_id, 0) > 0:
            self.ends[model_id] -= 1
            self.end()
            raise EngineDied("the engine process ended (code -9)")
        return await super().forward_backward(model_id, batch)

    def end(self) -> None:
        self.num_ends += 1
        self._models.clear()
        self._versions.clear()


class LateAfterAnEnd(Mortal):
    """Ends at passes that it has not done before; its next engine is there once the next pass has
    waited for it."""

    def __init__(self) -> None:
        super().__init__()
        self._is_down = False
        self._done: set[bytes] = set()

    async def forward_backward(self, model_id: str, batch: TrainBatch) -> TrainOutput:
        self.num_ends += self._is_down
        self._is_down = False
        content = pickle.dumps(batch)
        if model_id in self._models and content not in self._done and self.ends.get(model_id, 0):
            self.ends[model_id] -= 1
            self._models.clear()
            self._is_down = True
            raise EngineDied("the engine process ended (code -9)")
        output = await FakeBackend.forward_backward(self, model_id, batch)
        self._done.add(content)
        return output


class LateAfterASample(Mortal):
    """Ends at so many samples; its next engine is there once the next sample has waited for it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_left = 0
        self._is_down = False

    async def sample(
        self, version: str, request: SampleRequest, on_tokens: OnTokens | None = None
    ) -> SampleOutput:
        self.num_ends += self._is_down
        self._is_down = False
        if version in self._versions and self.num_left:
            self.num_left -= 1
            self._models.clear()
            self._versions.clear()
            self._is_down = True
            raise EngineDied("the engine process ended (code -9)")
        return await super().sample(version, request, on_tokens)


async def trained_on(folder: Path, backend: Mortal, num_ends: int) -> list[Any]:
    """What a client sees last of a model whose engine ends so often in the second half."""
    async with serving(folder, backend=backend) as api:
        model_id = await api.model(lora_config={"rank": 8, "seed": 1})
        number = await train(api, model_id, 1)
        backend.ends[model_id] = num_ends
        return await goes_on(api, model_id, await train(api, model_id, number))


@pytest.mark.parametrize("share", [0.0, 1e9], ids=["operations alone", "snapshots"])
async def test_an_engine_that_ends_is_a_delay(
    tmp_path: Path, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "SHARE", share)
    calm, backend = Mortal(), Mortal()
    undisturbed = await trained_on(tmp_path / "0", calm, 0)
    assert await trained_on(tmp_path / "2", backend, 2) == undisturbed
    assert (calm.num_ends, backend.num_ends) == (0, 2)


async def test_waiting_for_the_next_engine_is_no_attempt(tmp_path: Path) -> None:
    calm, backend = Mortal(), LateAfterAnEnd()
    undisturbed = await trained_on(tmp_path / "0", calm, 0)
    assert await trained_on(tmp_path / "2", backend, 2) == undisturbed
    assert backend.num_ends == 2


async def test_waiting_for_the_next_engine_is_no_attempt_at_a_sample(tmp_path: Path) -> None:
    backend = LateAfterASample()
    async with serving(tmp_path, backend=backend) as api:
        model_id = await api.model()
        sampler = await published(api, model_id, await train(api, model_id, 1))
        expected = await drawn(api, sampler, 0)
        backend.num_left = 2
        assert await drawn(api, sampler, 1) == expected
    assert backend.num_ends == 2


async def test_weights_that_go_to_the_disk_before_their_samples_find_them_are_sampled_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lane of their model is busy once they are published again, and nobody uses them."""
    monkeypatch.setattr(snapshots, "SHARE", 0.0)
    backend = Mortal()
    async with serving(tmp_path, backend=backend) as api:
        model_id = await api.model()
        sampler = await published(api, model_id, await train(api, model_id, 1))
        expected = await drawn(api, sampler, 0)
        backend.end()
        ensure = api.services.recovery.ensure

        async def slowly(*args: Any) -> None:
            await ensure(*args)
            await api.services.idle.offload_unused(0.0)

        monkeypatch.setattr(api.services.recovery, "ensure", slowly)
        assert await drawn(api, sampler, 1) == expected


class WrittenAnewMeanwhile(Mortal):
    """As it reads a version the first time, these files have just been written anew elsewhere, and
    have gone."""

    def __init__(self) -> None:
        super().__init__()
        self.api: Api | None = None

    async def publish(self, source: WeightsSource) -> str:
        if isinstance(source, FromCheckpoint) and self.api is not None:
            database, self.api = self.api.services.database, None
            newer = source.directory.with_name("version-newer")
            source.directory.rename(newer)
            place = f"recovery/{newer.parent.name}/{newer.name}"
            await database.write("UPDATE kept_versions SET directory = ?", place)
        return await super().publish(source)


async def test_weights_that_are_written_anew_while_they_are_read_are_sampled(
    tmp_path: Path,
) -> None:
    backend = WrittenAnewMeanwhile()
    async with serving(tmp_path, backend=backend) as api:
        model_id = await api.model()
        sampler = await published(api, model_id, await train(api, model_id, 1))
        expected = await drawn(api, sampler, 0)
        await api.services.idle.offload_unused(0.0)
        backend.api = api
        assert await drawn(api, sampler, 1) == expected
    assert backend.api is None


class GoneMeanwhile(Mortal):
    """As it reads a version, its files have just gone with all that was kept of its run."""

    def __init__(self) -> None:
        super().__init__()
        self.database: Database | None = None

    async def publish(self, source: WeightsSource) -> str:
        if isinstance(source, FromCheckpoint) and self.database is not None:
            await self.database.write("DELETE FROM kept_versions")
            shutil.rmtree(source.directory)
        return await super().publish(source)


async def test_weights_that_go_while_they_are_read_are_named(tmp_path: Path) -> None:
    backend = GoneMeanwhile()
    async with serving(tmp_path, backend=backend) as api:
        model_id = await api.model()
        sampler = await published(api, model_id, await train(api, model_id, 1))
        await api.services.idle.offload_unused(0.0)
        backend.database = api.services.database
        failure = await api.result(await api.sample(sampler, seq_id=1))
    assert failure["error"].startswith("weights version ")


class MortalInDeletions(Mortal):
    async def delete_model(self, model_id: str) -> None:
        self.end()
        raise EngineDied("the engine process ended (code -9)")


async def test_a_model_is_gone_with_an_engine_that_ends_as_it_is_deleted(tmp_path: Path) -> None:
    async with serving(tmp_path, backend=MortalInDeletions()) as api:
        model_id = await api.model()
        await train(api, model_id, 1)
        assert await api.result(await api.ok("unload_model", model_id=model_id))
        assert await api.services.recovery.models() == []


class QuietlyMortal(Mortal):
    """Ends when it has made a model again, while it holds no request."""

    async def create_model(self, model_id: str, base_model: str, lora: LoraSpec) -> None:
        await super().create_model(model_id, base_model, lora)
        if self.num_ends == 1:
            self.end()


class EndsOnceItIsBack(Mortal):
    """The engine after the first one ends with the last answer of a model's return, or before
    anybody asks it for more."""

    def numerics(self) -> str:
        if self.num_ends == 1:
            self.end()
        return super().numerics()


@pytest.mark.parametrize("kind", (QuietlyMortal, EndsOnceItIsBack))
async def test_an_engine_that_ends_while_a_model_comes_back_is_a_delay(
    kind: type[Mortal], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "SHARE", 0.0)
    calm, backend = kind(), kind()
    undisturbed = await trained_on(tmp_path / "0", calm, 0)
    assert await trained_on(tmp_path / "1", backend, 1) == undisturbed
    assert (calm.num_ends, backend.num_ends) == (0, 2)


class EndsWhileItWrites(Mortal):
    """Ends with the next snapshot when told, whose files are whole; reads slowly what it
    restores."""

    def __init__(self) -> None:
        super().__init__()
        self.ends_next = False
        self.has_ended = asyncio.Event()

    async def write_state(self, copy: int, directory: Path) -> StateCost:
        cost = await super().write_state(copy, directory)
        if self.ends_next:
            self.ends_next = False
            self.num_ends += 1
            self._models.clear()
            self._versions.clear()
            self.has_ended.set()
            await asyncio.sleep(0.1)
        return cost

    async def restore_state(self, *args: Any) -> None:
        await asyncio.sleep(0.3)
        await super().restore_state(*args)


async def test_a_model_comes_back_while_its_next_snapshot_takes_the_place_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "SHARE", 1e9)
    backend = EndsWhileItWrites()
    async with serving(tmp_path, backend=backend, archive_days=0) as api:
        model_id = await api.model()
        number = await train(api, model_id, 1, steps=1)
        await api.services.snapshots.settled()
        backend.ends_next = True
        await api.result(await api.forward_backward(model_id, number))
        async with asyncio.timeout(10):
            await backend.has_ended.wait()
        step = await api.result(await api.optim_step(model_id, number + 1, **ADAM))
        assert step["metrics"]["unclipped_grad_l2:mean"] > 0


async def test_a_snapshot_has_all_that_was_published_or_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine ends between a snapshot's state and the version that belongs to it."""
    monkeypatch.setattr(snapshots, "SHARE", 0.0)
    backend = EndsWhileItWrites()
    async with serving(tmp_path, backend=backend) as api:
        model_id = await api.model()
        number = await train(api, model_id, 1, steps=1)
        sampler = await published(api, model_id, number)
        expected = await drawn(api, sampler, 0)
        backend.ends_next = True
        monkeypatch.setattr(snapshots, "SHARE", 1e9)
        await api.result(await api.forward_backward(model_id, number + 1))
        async with asyncio.timeout(10):
            await backend.has_ended.wait()
        await api.services.snapshots.settled()
        assert await drawn(api, sampler, 1) == expected


async def test_what_ends_the_engine_each_time_fails_by_name_and_the_rest_goes_on(
    tmp_path: Path,
) -> None:
    backend = Mortal()
    async with serving(tmp_path, backend=backend) as api:
        session = await api.session()
        killer, other = await api.model(session), await api.model(session, 1)
        backend.ends[killer] = 3
        refused = await api.forward_backward(killer, 1)
        await train(api, other, 1)
        text = await api.failure(refused, "server")
        assert "3 times" in text
        assert "ForwardBackward" in text
        await train(api, killer, 2)
    assert backend.num_ends == 3


class Stillborn(Mortal):
    """Ends at each creation of a model, and at each load of a checkpoint."""

    async def create_model(self, model_id: str, base_model: str, lora: LoraSpec) -> None:
        self._end()

    async def load_model(self, *args: Any, **options: Any) -> LoraSpec:
        return self._end()

    def _end(self) -> NoReturn:
        self.num_ends += 1
        raise EngineDied("the engine process ended (code -9)")


@pytest.mark.parametrize("loads", [False, True])
async def test_a_model_whose_creation_ends_the_engine_each_time_is_none(
    tmp_path: Path, loads: bool
) -> None:
    fields = {}
    if loads:
        async with serving(tmp_path) as api:
            path = (await api.result(await save(api, await api.model(), 1)))["path"]
            keys = api.keys
    backend = Stillborn()
    async with serving(tmp_path, backend=backend) as api:
        if loads:
            api = Api(api.app, keys, keys["ann"])
            fields = {"path": path, "optimizer": False}
        route = "load_weights" if loads else "create_model"
        session = await api.session()
        accepted = await api.ok(
            route, session_id=session, model_seq_id=0, base_model="fake/tiny", **fields
        )
        model_id = accepted["model_id"]
        first = await api.forward_backward(model_id, 1)  # posted before it fails
        text = await api.failure(accepted, "server")
        assert "3 times" in text
        assert text.endswith("There is no such model")
        assert backend.num_ends == 3
        assert "does not exist" in await api.failure(first)
        after = await api.post("optim_step", model_id=model_id, seq_id=2, adam_params=ADAM)
        assert after.status_code == 404
        assert model_id in after.text
        row = await api.services.database.one(
            "SELECT state FROM models WHERE model_id = ?", model_id
        )
        assert row["state"] == "failed"
