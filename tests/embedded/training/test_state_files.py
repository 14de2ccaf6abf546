"""A model goes on from its files as if nothing had happened, bit for bit."""

import json
from pathlib import Path

import pytest
import torch

from tests.embedded.tiny import (
    Sampler,
    TinyStore,
    ask,
    open_store,
    random_prompt,
    supervised,
    train,
    write_tiny_model,
)
from tinkercloud.core.types import AdamParams, FromBase, FromCheckpoint, FromModel, LoraSpec
from tinkercloud.embedded.process import memory_budget
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.training import state_files
from tinkercloud.embedded.training.state_files import GRADIENT_FILE, RECOVERY_FILE
from tinkercloud.errors import StateCopyLost, StateDamaged, VersionLost
from tinkercloud.weights.checkpoints import OPTIMIZER_FILE, STATE_FILE

STEP = AdamParams(learning_rate=0.01, weight_decay=0.1, grad_clip_norm=0.5)
Results = list[object]


def forward_backward(store: TinyStore, seed: int) -> Results:
    output = train(store, "m", [supervised(9 + seed, seed), supervised(20, 7 * seed)])
    return [output.metrics, *(each["logprobs"].tobytes() for each in output.outputs)]


def begin(store: TinyStore, rank: int) -> None:
    """Two steps' worth of moments, and a gradient that waits for the third."""
    store.create_model("m", "tiny", LoraSpec(rank=rank, seed=3))
    for seed in (1, 2):
        forward_backward(store, seed)
    store.optim_step("m", STEP)
    forward_backward(store, 3)


def go_on(store: TinyStore) -> Results:
    """What the operations give, and what the model is after them."""
    results = [
        *forward_backward(store, 4),
        store.optim_step("m", STEP),
        *forward_backward(store, 5),
    ]
    model = store.model("m")
    tensors = {**model.params, **model.optimizer.state(), **model.grads}
    results += [model.optimizer.num_steps, list(model.params), list(model.grads)]
    results += [tensor.detach().numpy().tobytes() for tensor in tensors.values()]
    return [*results, *samples(store, store.publish(FromModel("m")))]


def samples(store: ModelStore, version: str) -> Results:
    request = ask(random_prompt(9, 1), n=2, max_tokens=12, use_eos=False, prompt_logprobs=True)
    output = Sampler(store).one(version, request)
    prompt = output.prompt_logprobs
    assert prompt is not None
    drawn = [(s.tokens.tobytes(), s.logprobs.tobytes()) for s in output.sequences]
    return [prompt.tobytes(), *drawn]


def written(store: ModelStore, folder: Path) -> Path:
    folder.mkdir()
    copy = store.copy_state("m")
    cost = store.state_writing(copy, folder)()
    assert cost.num_bytes == sum(path.stat().st_size for path in folder.iterdir())
    return folder


@pytest.mark.parametrize("rank", [4, 0], ids=["LoRA", "full"])
def test_a_restored_model_goes_on_bit_for_bit(
    folder: Path, tmp_path: Path, rank: int, dtype: torch.dtype
) -> None:
    store = open_store(folder, dtype=dtype)
    begin(store, rank)
    state = written(store, tmp_path / "state")
    expected = go_on(store)
    again = open_store(folder, dtype=dtype)
    again.restore_state("m", "tiny", state)
    assert go_on(again) == expected


@pytest.mark.parametrize("rank", [4, 0], ids=["LoRA", "full"])
def test_a_copy_does_not_move_with_the_operations_after_it(
    folder: Path, tmp_path: Path, rank: int
) -> None:
    store = open_store(folder)
    begin(store, rank)
    copy = store.copy_state("m")
    expected = go_on(store)
    (tmp_path / "state").mkdir()
    store.state_writing(copy, tmp_path / "state")()
    store.restore_state("m", "tiny", tmp_path / "state")
    assert go_on(store) == expected


def test_a_model_without_gradient_is_restored_without_one(store: TinyStore, tmp_path: Path) -> None:
    store.create_model("m", "tiny", LoraSpec(rank=4, seed=3))
    store.restore_state("m", "tiny", written(store, tmp_path / "state"))
    assert store.model("m").grads == {}
    assert store.model("m").optimizer.num_steps == 0


def test_what_is_not_finite_is_restored_as_it_was(store: TinyStore, tmp_path: Path) -> None:
    begin(store, 0)
    model = store.model("m")
    model.params["model.norm"].data[0] = float("inf")
    model.grads["lm_head"][0, 0] = float("nan")
    store.restore_state("m", "tiny", written(store, tmp_path / "state"))
    restored = store.model("m")
    assert restored is not model
    assert torch.equal(restored.params["model.norm"], model.params["model.norm"])
    assert torch.isnan(restored.grads["lm_head"][0, 0])


def test_each_copy_is_written_once_and_replaced_by_the_next(
    store: TinyStore, tmp_path: Path
) -> None:
    begin(store, 4)
    first, second = store.copy_state("m"), store.copy_state("m")
    with pytest.raises(StateCopyLost):
        store.state_writing(first, tmp_path)
    store.state_writing(second, tmp_path)
    with pytest.raises(StateCopyLost):
        store.state_writing(second, tmp_path)
    third = store.copy_state("m")
    store.delete_model("m")
    with pytest.raises(StateCopyLost):
        store.state_writing(third, tmp_path)


def without_room(store: TinyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a copy of the model that it has."""
    needed = memory_budget.state_bytes(store.model("m"))
    promised = memory_budget.promised_bytes(store.model("m"))
    free = [memory_budget.RESERVE_BYTES + promised + needed]
    store._budget = memory_budget.MemoryBudget(lambda: free[0])
    assert store._budget.has_room(needed, promised)
    free[0] -= 1
    monkeypatch.setattr(state_files, "_copied", lambda *_: pytest.fail("there is no room"))


@pytest.mark.parametrize("rank", [4, 0], ids=["LoRA", "full"])
def test_without_memory_for_a_copy_the_models_own_tensors_are_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    store = open_store(folder)
    begin(store, rank)
    without_room(store, monkeypatch)
    state = written(store, tmp_path / "state")
    expected = go_on(store)
    again = open_store(folder)
    again.restore_state("m", "tiny", state)
    assert go_on(again) == expected


@pytest.mark.parametrize("begun", [False, True], ids=["not begun", "underway"])
def test_what_shares_the_models_tensors_is_no_copy_after_its_next_operation(
    store: TinyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    begin(store, 4)
    without_room(store, monkeypatch)
    copy = store.copy_state("m")
    writing = store.state_writing(copy, tmp_path) if begun else None
    store.optim_step("m", STEP)
    with pytest.raises(StateCopyLost):
        (writing or store.state_writing(copy, tmp_path))()
    (tmp_path / "next").mkdir()
    assert store.state_writing(store.copy_state("m"), tmp_path / "next")()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def flip(path: Path) -> None:
    """A bit of the last number."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


FILES = ["adapter_model.safetensors", OPTIMIZER_FILE, GRADIENT_FILE, STATE_FILE, RECOVERY_FILE]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_a_damaged_folder_is_refused_by_name(
    store: TinyStore, tmp_path: Path, name: str, damage: object
) -> None:
    begin(store, 4)
    state = written(store, tmp_path / "state")
    damage(state / name)
    model = store.model("m")
    with pytest.raises(StateDamaged, match="written state of this model cannot be used"):
        store.restore_state("m", "tiny", state)
    assert store.model("m") is model


def test_a_foreign_folder_is_refused_by_name(store: TinyStore, tmp_path: Path) -> None:
    begin(store, 4)
    with pytest.raises(StateDamaged):
        store.restore_state("m", "tiny", tmp_path / "nowhere")
    (tmp_path / "checkpoint").mkdir()
    store.save_model("m", tmp_path / "checkpoint", True)
    with pytest.raises(StateDamaged, match=r"recovery\.json"):
        store.restore_state("m", "tiny", tmp_path / "checkpoint")
    state = written(store, tmp_path / "state")
    about = json.loads((state / STATE_FILE).read_text()) | {"base_model": "huge"}
    (state / STATE_FILE).write_text(json.dumps(about))
    recovery = json.loads((state / RECOVERY_FILE).read_text())
    del recovery["files"][STATE_FILE]
    (state / RECOVERY_FILE).write_text(json.dumps(recovery))
    with pytest.raises(StateDamaged, match="'huge'"):
        store.restore_state("m", "tiny", state)


@pytest.mark.parametrize("spilled", [False, True], ids=["in memory", "on disk"])
@pytest.mark.parametrize("rank", [4, 0, None], ids=["LoRA", "full", "base"])
def test_a_written_version_is_published_again_bit_for_bit(
    tmp_path: Path, rank: int | None, spilled: bool, dtype: torch.dtype
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_tiny_model(folder)
    store = open_store(folder, dtype=dtype, versions_bytes=1 if spilled else 2**30)
    begin(store, rank or 0)
    version = store.publish(FromBase("tiny") if rank is None else FromModel("m"))
    store.optim_step("m", STEP)
    store.publish(FromModel("m"))
    assert store.counts()["versions_on_disk"] == int(spilled and rank is not None)
    (tmp_path / "version").mkdir()
    store.version_writing(version, tmp_path / "version")()
    again = open_store(folder, dtype=dtype)
    published = again.publish(FromCheckpoint("tiny", tmp_path / "version"))
    assert samples(again, published) == samples(store, version)


def test_a_version_that_is_not_held_is_not_written(store: TinyStore, tmp_path: Path) -> None:
    version = store.publish(FromBase("tiny"))
    store.release(version)
    with pytest.raises(VersionLost):
        store.version_writing(version, tmp_path)
