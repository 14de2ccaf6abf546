"""What a request will take is estimated, and refused with the numbers where there is less."""

from pathlib import Path

import pytest
import torch

from tests.api.harness import serving, wire_datum
from tests.architectures.networks import FAMILIES
from tests.embedded.process.test_engine_process import config
from tests.embedded.tiny import (
    TinyStore,
    ask,
    open_store,
    random_prompt,
    supervised,
    train,
    write_tiny_family,
)
from tinkercloud.config import DraftConfig, EngineConfig, ModelSource
from tinkercloud.core.types import AdamParams, Datum, FromBase, FromModel, LoraSpec, TrainBatch
from tinkercloud.embedded.backend import EmbeddedBackend
from tinkercloud.embedded.model import memory
from tinkercloud.embedded.model.memory import free_bytes
from tinkercloud.embedded.process.memory_budget import (
    RESERVE_BYTES,
    MemoryBudget,
    model_bytes,
    promised_bytes,
    version_bytes,
)
from tinkercloud.embedded.process.protocol import EngineSettings
from tinkercloud.embedded.process.served_models import open_models
from tinkercloud.embedded.training.queue import TrainingQueue
from tinkercloud.errors import MemoryShort, ModelStateLost

SHORT, LONG = [supervised(40, 1)], [supervised(1000, 1)]
MIB = 1024**2


def limited(folder: Path, num_bytes: int, **options: int) -> TinyStore:
    store = open_store(folder, **options)
    store._budget = MemoryBudget(lambda: RESERVE_BYTES + num_bytes)
    return store


@pytest.mark.parametrize("rank", [4, 64, 0], ids=["rank 4", "rank 64", "full"])
def test_a_model_takes_what_was_estimated(folder: Path, rank: int) -> None:
    store = open_store(folder)
    store.create_model("m", "tiny", LoraSpec(rank=rank, seed=0))
    model = store.model("m")
    sizes = sum(param.nbytes for param in model.params.values())
    assert promised_bytes(model) == 3 * sizes
    train(store, "m", SHORT)
    assert promised_bytes(model) == 2 * sizes
    model.optim_step(AdamParams(learning_rate=0.01))
    assert promised_bytes(model) == sizes, "the next gradient"
    train(store, "m", SHORT)
    assert promised_bytes(model) == 0
    tensors = [*model.params.values(), *model.grads.values()]
    tensors += [*model.optimizer.exp_avg.values(), *model.optimizer.exp_avg_sq.values()]
    copy = 0 if rank else sizes * model.base.dtype.itemsize // 4
    assert sum(tensor.nbytes for tensor in tensors) + copy == model_bytes(model.spec, model.base)
    version = store.version(store.publish(FromModel("m")))
    assert version.own_bytes >= version_bytes(model.spec, model.base)
    assert version.own_bytes < 1.3 * version_bytes(model.spec, model.base)


def test_what_is_too_large_is_refused_with_the_numbers_and_the_rest_goes_on(folder: Path) -> None:
    store = limited(folder, 2 * MIB)
    store.create_model("small", "tiny", LoraSpec(rank=4, seed=0))
    with pytest.raises(MemoryShort) as refusal:
        store.create_model("m", "tiny", LoraSpec(rank=1024, seed=0))
    assert str(refusal.value).startswith(
        "an adapter of rank 1024 of tiny (1.9 million numbers in training) needs 28.3 MiB of "
        "memory, and 1.9 MiB are left here;"
    )
    assert refusal.value.category == "user"
    assert store.counts()["models"] == 1
    train(store, "small", SHORT)
    store.publish(FromModel("small"))


def test_what_was_accepted_and_is_not_used_yet_is_not_given_twice(folder: Path) -> None:
    one = 6 * MIB  # rank 128: 5.6 MB, of which a fresh model has a quarter
    store = limited(folder, one)
    store.create_model("a", "tiny", LoraSpec(rank=128, seed=0))
    with pytest.raises(MemoryShort):
        store.create_model("b", "tiny", LoraSpec(rank=128, seed=0))
    store.create_model("a", "tiny", LoraSpec(rank=128, seed=0))  # in its own place
    store.delete_model("a")
    store.create_model("b", "tiny", LoraSpec(rank=128, seed=0))


@pytest.mark.parametrize("activation_bytes", [2**31, 2**16], ids=["kept", "recomputed"])
def test_a_pass_that_is_too_long_is_refused_and_its_model_is_as_before(
    folder: Path, activation_bytes: int
) -> None:
    store = limited(folder, 5 * MIB // 2, activation_bytes=activation_bytes)
    store.create_model("m", "tiny", LoraSpec(rank=4, seed=0))
    if activation_bytes == 2**31:
        with pytest.raises(MemoryShort, match="a pass over 1000 tokens at once"):
            train_with_admission(store, LONG)
    else:
        train_with_admission(store, LONG)
    assert bool(store.model("m").grads) is (activation_bytes == 2**16)
    train_with_admission(store, SHORT)


def train_with_admission(store: TinyStore, data: list[Datum]) -> None:
    queue = TrainingQueue(store.limits, require=store.require_pass)
    queue.add(1, store.model("m"), TrainBatch(tuple(data), "cross_entropy"))
    while queue:
        for call in queue.step():
            assert call.error is None


def test_the_limit_of_the_setting_counts_what_the_process_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cpu")
    free = free_bytes(device, None)
    assert free is None or free > 0
    assert free_bytes(device, 1) == 0
    assert free_bytes(device, 2**50) != 0
    # What is free changes from one moment to the next.
    monkeypatch.setattr(memory, "_of_machine", lambda: 2**30)
    monkeypatch.setattr(memory, "_of_group", lambda: None)
    assert free_bytes(device, None) == free_bytes(device, 2**50) == 2**30
    monkeypatch.setattr(memory, "_resident", lambda: 1000)
    assert free_bytes(device, 1500) == 500


@pytest.mark.parametrize("rank", [4, 0], ids=["LoRA", "full"])
async def test_a_model_that_was_put_away_goes_on_to_the_bit(
    folder: Path, tmp_path: Path, rank: int
) -> None:
    """Through the whole server, in the middle of a step, beside a twin that stays."""
    backend = EmbeddedBackend(config(folder, tmp_path))
    async with serving(tmp_path / "data", backend=backend) as api:
        fields = {"base_model": "tiny", "lora_config": {"rank": rank, "seed": 1}}
        session = await api.session()
        twins = [await api.model(session, number, **fields) for number in range(2)]
        datum = wire_datum(list(range(20)))
        for model_id in twins:
            await api.result(await api.forward_backward(model_id, 1, [datum]))
            await api.result(await api.optim_step(model_id, 2, learning_rate=0.01))
            await api.result(await api.forward_backward(model_id, 3, [datum]))
        assert await api.services.idle.offload(("ann", twins[0]))
        with pytest.raises(ModelStateLost):
            await backend.copy_state(twins[0])
        results = []
        for model_id in twins:
            step = await api.result(await api.optim_step(model_id, 4, learning_rate=0.01))
            passed = await api.result(await api.forward_backward(model_id, 5, [datum]))
            results.append([step, passed.metrics, passed.outputs[0]["logprobs"].tolist()])
        assert results[0] == results[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_quotas_count_the_bytes_that_the_engine_counts(tmp_path: Path, family: str) -> None:
    folder = write_tiny_family(tmp_path / "model", family)
    settings = EngineSettings(
        models=(ModelSource("tiny", folder),),
        dtype="float32",
        cache_dir=tmp_path,
        drafts_dir=tmp_path,
        speculate="off",
        speculate_trace=None,
        engine=EngineConfig(threads=1),
        draft=DraftConfig(),
    )
    (served,), store = open_models(settings)
    narrow = LoraSpec(rank=4, seed=1, train_mlp=False, train_unembed=False)
    for spec in (LoraSpec(rank=4, seed=1), narrow, LoraSpec(rank=0, seed=1)):
        store.create_model("m", "tiny", spec)
        sizes = sum(tensor.nbytes for tensor in store.model("m").params.values())
        assert served.training_bytes(spec) == sizes * (4 if spec.rank else 5)
        assert served.training_bytes(spec) == model_bytes(spec, store.base("tiny"))


async def test_a_refusal_comes_from_the_engine_when_nothing_can_make_room(
    folder: Path, tmp_path: Path
) -> None:
    backend = EmbeddedBackend(config(folder, tmp_path, memory_bytes=1))
    asked: list[bool] = [True, True, False]

    async def make_room() -> bool:
        return asked.pop(0)

    backend.use_for_room(make_room)
    await backend.start()
    try:
        with pytest.raises(MemoryShort, match=r"rank 8 of tiny .* needs 0\.. MiB"):
            await backend.create_model("m", "tiny", LoraSpec(rank=8, seed=0))
        assert not asked
        version = await backend.publish(FromBase("tiny"))
        await backend.sample(version, ask(random_prompt(5, 1)))
    finally:
        await backend.stop()
