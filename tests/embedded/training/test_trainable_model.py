"""The trainer against transformers, PEFT and torch.optim, on a tiny random Llama."""

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch.utils._python_dispatch import TorchDispatchMode

from tests.embedded.tiny import (
    VOCAB,
    Sampler,
    ask,
    grads,
    open_store,
    params,
    random_prompt,
    reference,
    supervised,
    train,
)
from tinkercloud.core.types import AdamParams, Datum, FromBase, FromCheckpoint, FromModel, LoraSpec
from tinkercloud.embedded.model import freed_memory
from tinkercloud.embedded.native.compiler import library
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.training import head as train_head
from tinkercloud.embedded.training.optimizer import AdamW
from tinkercloud.errors import ModelStateLost, UserError

DATA = [supervised(n, n) for n in (5, 17, 1, 40)]
STEP = AdamParams(learning_rate=0.01)


def warmed_up(store: ModelStore, model_id: str, **spec: object) -> None:
    """A LoRA model that has left B = 0, where the gradient of A vanishes."""
    store.create_model(model_id, "tiny", LoraSpec(**{"rank": 4, "seed": 3} | spec))
    train(store, model_id, DATA[:2])
    store.optim_step(model_id, STEP)


def summed_loss(model: torch.nn.Module, data: list[Datum]) -> torch.Tensor:
    """The obvious reference: one sequence at a time, all logits, plain autograd."""
    total = torch.zeros((), dtype=torch.float64)
    for datum in data:
        logits = model(torch.from_numpy(datum.tokens.astype(np.int64))[None]).logits[0]
        logprobs = torch.log_softmax(logits, -1)
        chosen = logprobs.gather(-1, torch.from_numpy(datum.inputs["target_tokens"])[:, None])[:, 0]
        total = total - (chosen * torch.from_numpy(datum.inputs["weights"])).double().sum()
    return total


@pytest.mark.parametrize("rank", [4, 0], ids=["adapter", "all weights"])
@pytest.mark.parametrize("how", ["trained", "read back"])
def test_a_deleted_models_memory_is_free_at_once(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, how: str
) -> None:
    """Without the garbage collector, which may not run for hours in an idle engine."""
    store.create_model("m", "tiny", LoraSpec(rank=rank, seed=3))
    train(store, "m", DATA)
    store.optim_step("m", STEP)
    store.release(store.publish(FromModel("m")))
    if how == "read back":
        store.state_writing(store.copy_state("m"), tmp_path)()
        store.restore_state("m", "tiny", tmp_path)
    model = store.model("m")
    held = [
        weakref.ref(each) for each in (*model.params.values(), *model.optimizer.state().values())
    ]
    del model
    still_held: list[list[object]] = []
    monkeypatch.setattr(
        *(freed_memory, "give_back"),
        lambda: still_held.append([each for each in held if each() is not None]),
    )
    gc.disable()
    try:
        store.delete_model("m")
        assert still_held == [[]], "all of it goes back to the system"
    finally:
        gc.enable()


def assert_same_gradients(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Equal up to the order of float32 sums: 1e-5 of the tensor's largest entry."""
    assert a.keys() == b.keys()
    for name, grad in a.items():
        torch.testing.assert_close(grad, b[name], rtol=0, atol=1e-5 * float(b[name].abs().max()))


def test_lora_gradients_equal_those_of_peft(
    store: ModelStore, folder: Path, tmp_path: Path
) -> None:
    warmed_up(store, "m")
    store.save_model("m", tmp_path, False)
    peft = PeftModel.from_pretrained(reference(folder), tmp_path, is_trainable=True)
    loss = summed_loss(peft, DATA)
    loss.backward()
    output = train(store, "m", DATA)
    assert output.metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=1e-6)
    ours = grads(store, "m")
    theirs = {
        n.removeprefix("base_model.model.").removesuffix(".default.weight"): p.grad
        for n, p in peft.named_parameters()
        if "lora_" in n
    }
    assert all(grad.abs().max() > 0 for grad in ours.values())
    assert_same_gradients(ours, theirs)


def test_full_parameter_gradients_equal_those_of_transformers(
    store: ModelStore, folder: Path
) -> None:
    store.create_model("m", "tiny", LoraSpec(rank=0, seed=0))
    model = reference(folder)
    summed_loss(model, DATA).backward()
    train(store, "m", DATA)
    theirs = {n.removesuffix(".weight"): p.grad for n, p in model.named_parameters()}
    assert_same_gradients(grads(store, "m"), theirs)


def test_gradients_of_two_calls_add_up_to_those_of_the_union(store: ModelStore) -> None:
    warmed_up(store, "m")
    train(store, "m", DATA)
    union = grads(store, "m")
    store.model("m").grads = {}
    train(store, "m", DATA[:3])
    train(store, "m", DATA[3:])
    assert_same_gradients(grads(store, "m"), union)


@pytest.mark.parametrize("tokens", [1, 20, 1024])
def test_gradients_do_not_depend_on_the_size_of_micro_batches(folder: Path, tokens: int) -> None:
    results = {}
    for size in (10_000, tokens):
        store = open_store(folder, tokens=size)
        warmed_up(store, "m")
        store.model("m").grads = {}
        output = train(store, "m", DATA)
        results[size] = (grads(store, "m"), output)
    assert_same_gradients(results[tokens][0], results[10_000][0])
    assert [o["logprobs"].shape for o in results[tokens][1].outputs] == [(5,), (17,), (1,), (40,)]


def test_recomputed_layers_give_the_same_gradients(folder: Path, store: ModelStore) -> None:
    warmed_up(store, "m")
    train(store, "m", DATA)
    plain = grads(store, "m")
    store = open_store(folder, activation_bytes=1)
    warmed_up(store, "m")
    store.model("m").grads = {}
    train(store, "m", DATA)
    assert_same_gradients(grads(store, "m"), plain)


def test_two_adapters_trained_interleaved_equal_the_two_trained_alone(folder: Path) -> None:
    def steps(store: ModelStore, order: list[str]) -> dict[str, dict[str, torch.Tensor]]:
        for name, seed in (("a", 1), ("b", 2)):
            store.create_model(name, "tiny", LoraSpec(rank=4, seed=seed))
        turns = {"a": 0, "b": 0}
        for name in order:
            train(store, name, [supervised(9 + turns[name], 7 * turns[name])])
            store.optim_step(name, STEP)
            turns[name] += 1
        return {name: params(store, name) for name in turns}

    alone = steps(open_store(folder), ["a", "a", "a", "b", "b", "b"])
    mixed = steps(open_store(folder), ["a", "b", "b", "a", "b", "a"])
    for model_id, tensors in alone.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, mixed[model_id][name]), (model_id, name)


def test_training_leaves_the_base_bitwise_unchanged(store: ModelStore) -> None:
    before = {n: t.clone() for n, t in store.base("tiny").weights.items()}
    warmed_up(store, "lora")
    store.create_model("full", "tiny", LoraSpec(rank=0, seed=0))
    train(store, "full", DATA)
    store.optim_step("full", STEP)
    assert all(torch.equal(t, before[n]) for n, t in store.base("tiny").weights.items())


def test_forward_only_leaves_no_gradient(store: ModelStore) -> None:
    warmed_up(store, "m")
    with_gradient = train(store, "m", DATA)
    store.model("m").grads = {}
    without = train(store, "m", DATA, forward_only=True)
    assert grads(store, "m") == {}
    for a, b in zip(with_gradient.outputs, without.outputs, strict=True):
        np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=1e-5)


def test_a_loss_that_is_not_finite_drops_its_gradient_only(store: ModelStore) -> None:
    warmed_up(store, "m")
    train(store, "m", DATA[:1])
    before = grads(store, "m")
    good = supervised(6, 1)
    bad = Datum(
        good.tokens,
        {
            "target_tokens": good.inputs["target_tokens"],
            "logprobs": np.full(6, -2000.0, np.float32),
            "advantages": np.ones(6, np.float32),
        },
    )
    with pytest.raises(UserError, match="importance_sampling loss of datum 0 is -inf"):
        train(store, "m", [bad], "importance_sampling")
    assert all(torch.equal(g, before[n]) for n, g in grads(store, "m").items())


def test_several_targets_per_position_sum_over_all_of_them(store: ModelStore) -> None:
    warmed_up(store, "m")
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 256, (12, 3))
    weights = rng.normal(size=(12, 3)).astype(np.float32)
    tokens = rng.integers(0, 256, 12).astype(np.int32)
    wide = train(store, "m", [Datum(tokens, {"target_tokens": targets, "weights": weights})])
    gradient = grads(store, "m")
    store.model("m").grads = {}
    loss = 0.0
    for k in range(3):
        datum = Datum(tokens, {"target_tokens": targets[:, k], "weights": weights[:, k]})
        output = train(store, "m", [datum])
        loss += output.metrics["loss:sum"]
        np.testing.assert_allclose(
            output.outputs[0]["logprobs"], wide.outputs[0]["logprobs"][:, k], atol=1e-5
        )
    assert wide.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(grads(store, "m"), gradient)


class _LargestTensor(TorchDispatchMode):
    """Remembers the largest number of elements that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_the_full_logits_of_a_long_batch_are_never_held(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_head, "LOGIT_ROWS", 16)
    warmed_up(store, "m")
    with _LargestTensor() as largest:
        train(store, "m", [supervised(600, 1)])
    assert largest.numel < 600 * VOCAB


@pytest.mark.parametrize(
    "hyper",
    [
        AdamParams(learning_rate=0.02),
        AdamParams(0.01, beta1=0.5, beta2=0.7, eps=1e-3, weight_decay=0.3),
        AdamParams(0.01, grad_clip_norm=0.5, weight_decay=0.1),
    ],
)
def test_adamw_equals_torch_adamw(hyper: AdamParams) -> None:
    torch.manual_seed(0)
    start = {"a": torch.randn(4, 3), "b": torch.randn(5)}
    ours = {n: t.clone() for n, t in start.items()}
    theirs = {n: t.clone().requires_grad_() for n, t in start.items()}
    optimizer = AdamW(ours)
    torch_optimizer = torch.optim.AdamW(
        theirs.values(), lr=hyper.learning_rate, betas=(hyper.beta1, hyper.beta2), eps=hyper.eps,
        weight_decay=hyper.weight_decay,
    )  # fmt: skip
    for _ in range(5):
        gradient = {n: torch.randn_like(t) for n, t in start.items()}
        for n, t in theirs.items():
            t.grad = gradient[n].clone()
        norm = torch.nn.utils.get_total_norm([t.grad for t in theirs.values()])
        if hyper.grad_clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(theirs.values(), hyper.grad_clip_norm)
        torch_optimizer.step()
        metrics = optimizer.step(gradient, hyper)
        assert metrics["unclipped_grad_l2:mean"] == pytest.approx(float(norm), rel=1e-5)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name].detach(), rtol=1e-6, atol=1e-7)


def test_a_gradient_that_is_not_finite_is_refused_and_cleared(store: ModelStore) -> None:
    warmed_up(store, "m")
    train(store, "m", DATA[:1])
    model = store.model("m")
    next(iter(model.grads.values()))[0, 0] = float("nan")
    before = params(store, "m")
    with pytest.raises(UserError, match="not finite"):
        store.optim_step("m", STEP)
    assert all(torch.equal(t, before[n]) for n, t in params(store, "m").items())
    assert store.optim_step("m", STEP)["unclipped_grad_l2:mean"] == 0.0


@pytest.mark.parametrize("rank", [0, 4])
def test_a_resumed_model_takes_the_same_next_step(folder: Path, tmp_path: Path, rank: int) -> None:
    store = open_store(folder)
    store.create_model("m", "tiny", LoraSpec(rank=rank, seed=5))
    for seed in range(3):
        train(store, "m", [supervised(20, seed)])
        store.optim_step("m", STEP)
    store.save_model("m", tmp_path, True)
    other = open_store(folder)
    assert other.load_model("m2", "tiny", tmp_path, True) == LoraSpec(rank=rank, seed=5)
    for owner, name in ((store, "m"), (other, "m2")):
        train(owner, name, [supervised(20, 9)])
        owner.optim_step(name, STEP)
    ours, theirs = params(store, "m"), params(other, "m2")
    assert all(torch.equal(t, theirs[n]) for n, t in ours.items())


def test_a_model_loaded_without_the_optimizer_starts_its_steps_anew(
    store: ModelStore, tmp_path: Path
) -> None:
    warmed_up(store, "m")
    store.save_model("m", tmp_path, False)
    store.load_model("m2", "tiny", tmp_path, False)
    assert store.model("m2").optimizer.num_steps == 0
    with pytest.raises(UserError, match="no optimizer state"):
        store.load_model("m3", "tiny", tmp_path, True)


def test_a_checkpoint_with_nan_weights_is_refused(store: ModelStore, tmp_path: Path) -> None:
    store.create_model("m", "tiny", LoraSpec(rank=0, seed=0))
    with torch.no_grad():
        store.model("m").params["model.norm"][0] = float("nan")
    store.save_model("m", tmp_path, False)
    with pytest.raises(UserError, match="not finite"):
        store.load_model("m2", "tiny", tmp_path, False)


def test_a_checkpoint_of_another_shape_is_refused(
    store: ModelStore, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    warmed_up(store, "m", rank=4)
    store.save_model("m", tmp_path, False)
    state = (tmp_path / "training_state.json").read_text().replace('"rank": 4', '"rank": 5')
    (tmp_path / "training_state.json").write_text(state)
    with pytest.raises(UserError, match="this base model needs"):
        store.load_model("m2", "tiny", tmp_path, False)


def test_train_flags_choose_the_adapted_modules(store: ModelStore) -> None:
    def leaves(**flags: bool) -> set[str]:
        store.create_model("x", "tiny", LoraSpec(rank=2, seed=0, **flags))
        return {n.rsplit(".", 1)[-1] for n in store.model("x").adapter}

    off = {"train_attn": False, "train_mlp": False, "train_unembed": False}
    assert leaves(**off | {"train_attn": True}) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert leaves(**off | {"train_mlp": True}) == {"gate_proj", "up_proj", "down_proj"}
    assert leaves(**off | {"train_unembed": True}) == {"lm_head"}


def test_the_seed_decides_the_adapter(store: ModelStore) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        store.create_model(name, "tiny", LoraSpec(rank=4, seed=seed))
    a, b, c = (params(store, n)["lm_head.lora_A"] for n in "abc")
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.skipif(library() is None, reason="there is no C compiler")
def test_published_full_weights_have_the_memory_that_passes_read_until_the_next_step(
    store: ModelStore,
) -> None:
    warmed_up(store, "m", rank=0)
    model = store.model("m")
    first, second = (store.version(store.publish(FromModel("m"))) for _ in range(2))
    assert first.weights is second.weights
    assert first.weights is model.weights().values
    train(store, "m", DATA[:1])
    store.optim_step("m", STEP)
    assert model.weights().values is not first.weights


def test_a_published_version_does_not_move_with_training(store: ModelStore) -> None:
    warmed_up(store, "m")
    version = store.publish(FromModel("m"))
    sampler = Sampler(store)
    request = ask(random_prompt(10, 1), max_tokens=20, use_eos=False)
    before = sampler.one(version, request).sequences[0].logprobs
    for seed in range(3):
        train(store, "m", [supervised(20, seed)])
        store.optim_step("m", AdamParams(learning_rate=0.1))
    sampler = Sampler(store)  # that knows no beginnings
    assert np.array_equal(sampler.one(version, request).sequences[0].logprobs, before)
    newer = sampler.one(store.publish(FromModel("m")), request).sequences[0].logprobs
    assert not np.array_equal(newer, before)


@pytest.mark.parametrize("rank", [0, 4])
def test_model_checkpoint_and_trainer_agree_on_logprobs(
    store: ModelStore, tmp_path: Path, rank: int
) -> None:
    store.create_model("m", "tiny", LoraSpec(rank=rank, seed=1))
    train(store, "m", DATA)
    store.optim_step("m", STEP)
    store.save_model("m", tmp_path, False)
    prompt = random_prompt(30, 4)
    datum = Datum(
        np.array(prompt[:-1], np.int32),
        {"target_tokens": np.array(prompt[1:], np.int64), "weights": np.ones(29, np.float32)},
    )
    trained = train(store, "m", [datum], forward_only=True).outputs[0]["logprobs"]
    request = ask(prompt, max_tokens=1, prompt_logprobs=True)
    sources = (FromModel("m"), FromCheckpoint("tiny", tmp_path))
    for source in sources:
        sampled = Sampler(store).one(store.publish(source), request).prompt_logprobs
        np.testing.assert_allclose(sampled[1:], trained, atol=1e-5)
    base = Sampler(store).one(store.publish(FromBase("tiny")), request).prompt_logprobs
    assert np.abs(base[1:] - trained).max() > 1e-3


def test_an_unknown_model_has_lost_its_state(store: ModelStore) -> None:
    with pytest.raises(ModelStateLost, match="create_training_client_from_state"):
        store.optim_step("never", STEP)


@pytest.mark.parametrize("rank", [0, 4])
def test_versions_beyond_the_memory_limit_go_to_disk_and_come_back(folder: Path, rank: int) -> None:
    roomy, tight = open_store(folder), open_store(folder, versions_bytes=1)
    texts: dict[str, list[list[int]]] = {}
    for name, store in (("roomy", roomy), ("tight", tight)):
        store.create_model("m", "tiny", LoraSpec(rank=rank, seed=3))
        versions = []
        for seed in range(3):
            train(store, "m", [supervised(20, seed)])
            store.optim_step("m", STEP)
            versions.append(store.publish(FromModel("m")))
        request = ask(random_prompt(10, 1), max_tokens=20, use_eos=False)
        texts[name] = [
            Sampler(store).one(v, request).sequences[0].tokens.tolist() for v in versions
        ]
        for version in versions[:2]:
            store.release(version)
    assert texts["tight"] == texts["roomy"]
    assert (roomy.counts()["versions_on_disk"], tight.counts()["versions_on_disk"]) == (0, 0)
    assert tight.counts()["versions"] == 1


def test_released_versions_leave_no_file(folder: Path) -> None:
    store = open_store(folder, versions_bytes=1)
    store.create_model("m", "tiny", LoraSpec(rank=4, seed=3))
    versions = [store.publish(FromModel("m")) for _ in range(4)]
    spilled = store._versions._folder
    assert len(list(spilled.iterdir())) == store.counts()["versions_on_disk"] == 3
    for version in versions:
        store.release(version)
    assert list(spilled.iterdir()) == []


def everything(store: ModelStore, model_id: str) -> dict[str, torch.Tensor]:
    model = store.model(model_id)
    kinds = ("params", model.params), ("moments", model.optimizer.state()), ("grads", model.grads)
    return {f"{kind} {n}": t.detach().clone() for kind, ts in kinds for n, t in ts.items()}


@pytest.mark.parametrize("rank", [4, 0])
@pytest.mark.parametrize(
    "step",
    [
        AdamParams(learning_rate=1e308),
        AdamParams(learning_rate=3e38),
        AdamParams(learning_rate=1e30, weight_decay=1e30),
    ],
)
def test_a_step_whose_weights_would_not_be_finite_changes_nothing(
    store: ModelStore, rank: int, step: AdamParams
) -> None:
    for model_id in ("refused", "undisturbed"):
        store.create_model(model_id, "tiny", LoraSpec(rank=rank, seed=3))
        train(store, model_id, DATA[:2])
        store.optim_step(model_id, STEP)
        train(store, model_id, DATA[2:])
    before = everything(store, "refused")
    with pytest.raises(UserError, match="the model is as before it"):
        store.optim_step("refused", step)
    after = everything(store, "refused")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for model_id in ("refused", "undisturbed"):
        store.optim_step(model_id, STEP)
    one, other = everything(store, "refused"), everything(store, "undisturbed")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_step_that_is_large_and_finite_is_made() -> None:
    """The bound that costs nothing says no; the weights themselves say yes."""
    weight = torch.full((3,), 1e30)
    optimizer = AdamW({"w": weight})
    optimizer.step({"w": torch.ones(3)}, AdamParams(learning_rate=1e30, eps=1e-8))
    assert torch.isfinite(weight).all()
    assert float(weight[0]) == pytest.approx(0.0, abs=1e24)
