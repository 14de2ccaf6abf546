"""The queue of forward_backward calls: turns, shared passes, errors."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.embedded.exactness import assert_same_gradients_in_company
from tests.embedded.tiny import supervised, train_alone
from tinkercloud.core.types import Datum, LoraSpec, TrainBatch
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.native.compiler import library
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.training import micro_batch_pass, trainable_model
from tinkercloud.embedded.training import queue as training_queue
from tinkercloud.embedded.training.compiled_blocks import CompiledBlocks
from tinkercloud.embedded.training.micro_batches import KeptBytes, Limits, micro_batches
from tinkercloud.embedded.training.queue import Finished, TrainingQueue
from tinkercloud.embedded.training.torch_blocks import TorchBlocks
from tinkercloud.embedded.training.trainable_model import TrainableModel
from tinkercloud.errors import UserError

LIMITS = Limits(tokens=100)


def batch(*lengths: int, seed: int = 0, **more: object) -> TrainBatch:
    data = tuple(supervised(n, seed + i) for i, n in enumerate(lengths))
    return TrainBatch(data, "cross_entropy", **more)


def poisoned() -> TrainBatch:
    good = supervised(6, 1)
    inputs = {
        "target_tokens": good.inputs["target_tokens"],
        "logprobs": np.full(6, -2000.0, np.float32),
        "advantages": np.ones(6, np.float32),
    }
    return TrainBatch((Datum(good.tokens, inputs),), "importance_sampling")


def create(store: ModelStore, *names: str) -> list[TrainableModel]:
    for seed, name in enumerate(names):
        store.create_model(name, "tiny", LoraSpec(rank=4, seed=seed))
    models = [store.model(name) for name in names]
    generator = torch.Generator().manual_seed(0)
    for model in models:
        for _, b in model.adapter.values():
            b.data.normal_(0, 0.1, generator=generator)
    return models


def finish(queue: TrainingQueue) -> list[Finished]:
    done: list[Finished] = []
    while len(queue):
        done += queue.step()
    return done


def alone(model: TrainableModel, work: TrainBatch) -> dict[str, torch.Tensor]:
    """The gradient of one call by itself; the model is left without."""
    train_alone(model, work, LIMITS)
    gradients, model.grads = model.grads, {}
    return gradients


def outputs_of(model: TrainableModel, work: TrainBatch, limits: Limits) -> list[np.ndarray]:
    """Log-probabilities of each datum."""
    output = train_alone(model, replace(work, forward_only=True), limits)
    return [each["logprobs"] for each in output.outputs]


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Grows by the numbers of datums of every pass's shares."""
    seen: list[list[int]] = []
    run = training_queue.run_pass

    def counted(base, shares, **more):
        seen.append([len(share.indices) for share in shares])
        return run(base, shares, **more)

    monkeypatch.setattr(training_queue, "run_pass", counted)
    return seen


def test_small_calls_of_several_models_share_a_pass_with_the_results_of_separate_ones(
    store: ModelStore, passes: list[list[int]]
) -> None:
    models = create(store, "a", "b", "c")
    works = [batch(10, 20, seed=1), batch(30, seed=5), batch(7, seed=9)]
    expected = [alone(m, w) for m, w in zip(models, works, strict=True)]
    passes.clear()
    queue = TrainingQueue(LIMITS)
    for i, (model, work) in enumerate(zip(models, works, strict=True)):
        queue.add(i, model, work)
    done = finish(queue)
    assert [result.call_id for result in done] == [0, 1, 2]
    assert passes == [[2, 1, 1]]
    for model, gradients in zip(models, expected, strict=True):
        assert_same_gradients_in_company(gradients, model.grads)


def test_a_micro_batch_that_does_not_fit_a_pass_waits_for_the_next(
    store: ModelStore, passes: list[list[int]]
) -> None:
    a, b, c = create(store, "a", "b", "c")
    queue = TrainingQueue(LIMITS)
    for i, (model, length) in enumerate(((a, 60), (b, 60), (c, 40))):
        queue.add(i, model, batch(length))
    finish(queue)
    assert passes == [[1, 1], [1]]


def test_users_are_those_who_train_or_did_a_moment_ago(store: ModelStore) -> None:
    a, b = create(store, "a", "b")
    queue = TrainingQueue(LIMITS)
    assert queue.users_lately() == frozenset()
    queue.add(0, a, batch(10, user="ada"))
    assert queue.users_lately() == {"ada"}
    finish(queue)
    queue.add(1, b, batch(10, user="bob"))
    assert queue.users_lately() == {"ada", "bob"}


def test_training_and_scoring_never_share_a_pass(
    store: ModelStore, passes: list[list[int]]
) -> None:
    a, b = create(store, "a", "b")
    queue = TrainingQueue(LIMITS)
    queue.add(0, a, batch(10))
    queue.add(1, b, batch(10, forward_only=True))
    finish(queue)
    assert passes == [[1], [1]]
    assert b.grads == {}


def test_full_models_have_their_passes_to_themselves(
    store: ModelStore, passes: list[list[int]]
) -> None:
    (a,) = create(store, "a")
    store.create_model("full", "tiny", LoraSpec(rank=0, seed=0))
    queue = TrainingQueue(LIMITS)
    queue.add(0, a, batch(10))
    queue.add(1, store.model("full"), batch(10))
    finish(queue)
    assert passes == [[1], [1]]


def test_models_alternate_by_micro_batch(store: ModelStore) -> None:
    a, b = create(store, "a", "b")
    queue = TrainingQueue(LIMITS)
    queue.add(0, a, batch(*[100] * 6))
    queue.add(1, b, batch(*[100] * 2))
    order = [result.call_id for result in finish(queue)]
    assert order == [1, 0]


def test_a_user_with_many_models_gets_no_more_passes_than_one_with_a_single_model(
    store: ModelStore, passes: list[list[int]]
) -> None:
    *many, single = create(store, *"abcdef")
    queue = TrainingQueue(LIMITS)
    for i, model in enumerate(many):
        queue.add(i, model, batch(90, 90, 90, user="many"))
    queue.add(9, single, batch(90, 90, 90, user="single"))
    while 9 not in [result.call_id for result in queue.step()]:
        assert len(passes) <= 6


def test_a_stream_of_small_calls_does_not_starve_a_large_one(store: ModelStore) -> None:
    large, small = create(store, "large", "small")
    queue = TrainingQueue(LIMITS)
    queue.add(0, large, batch(*[100] * 4))
    answered = 0
    queue.add(1, small, batch(100))
    for _ in range(10_000):
        done = queue.step()
        if any(result.call_id == 0 for result in done):
            break
        for _ in done:
            answered += 1
            queue.add(1 + answered, small, batch(100))
    assert 3 <= answered <= 5


def test_calls_of_one_model_finish_in_their_order(store: ModelStore) -> None:
    (a,) = create(store, "a")
    queue = TrainingQueue(LIMITS)
    for i in range(3):
        queue.add(i, a, batch(60, 60, seed=i))
    assert [result.call_id for result in finish(queue)] == [0, 1, 2]


def test_a_loss_that_is_not_finite_fails_its_call_only(store: ModelStore) -> None:
    a, b = create(store, "a", "b")
    works = (poisoned(), TrainBatch((poisoned().data[0],), "importance_sampling"))
    works[1].data[0].inputs["logprobs"][:] = -4.0
    expected = alone(b, works[1])
    queue = TrainingQueue(LIMITS)
    queue.add(0, a, works[0])
    queue.add(1, b, works[1])
    failed, fine = finish(queue)
    assert isinstance(failed.error, UserError)
    assert a.grads == {}
    assert fine.error is None
    assert_same_gradients_in_company(expected, b.grads)


def test_when_a_shared_pass_breaks_only_the_call_at_fault_fails(store: ModelStore) -> None:
    a, b = create(store, "a", "b")
    broken = batch(8)
    broken.data[0].inputs["target_tokens"][3] = 10**6  # no such token: an index error
    expected = alone(b, batch(9))
    queue = TrainingQueue(LIMITS)
    queue.add(0, a, broken)
    queue.add(1, b, batch(9))
    results = {result.call_id: result for result in finish(queue)}
    assert isinstance(results[0].error, IndexError)
    assert a.grads == {}
    assert results[1].error is None
    assert_same_gradients_in_company(expected, b.grads)


def test_nothing_counts_twice_when_a_shared_pass_breaks_at_its_end(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, works = create(store, "a", "b"), (batch(125, 8), batch(125, 9))
    expected = [alone(model, work) for model, work in zip(models, works, strict=True)]
    run, num_broken = training_queue.run_pass, 0

    def breaking(base, shares, **more):
        nonlocal num_broken
        yield from run(base, shares, **more)
        if len(shares) > 1:
            num_broken += 1
            raise RuntimeError("all gradients are added by now")

    monkeypatch.setattr(training_queue, "run_pass", breaking)
    queue = TrainingQueue(LIMITS)
    for i, (model, work) in enumerate(zip(models, works, strict=True)):
        queue.add(i, model, work)
    assert all(result.error is None for result in finish(queue))
    assert num_broken == 1
    for model, gradients in zip(models, expected, strict=True):
        assert_same_bits(gradients, model.grads)


def test_a_failed_call_drops_the_gradient_of_its_earlier_micro_batches(store: ModelStore) -> None:
    (a,) = create(store, "a")
    before = alone(a, batch(12))
    a.grads = {n: g.clone() for n, g in before.items()}
    good = poisoned().data[0]
    fine = Datum(good.tokens, {**good.inputs, "logprobs": np.full(6, -4.0, np.float32)})
    data = (*[fine] * 20, good)
    queue = TrainingQueue(LIMITS)
    queue.add(0, a, TrainBatch(data, "importance_sampling"))
    (result,) = finish(queue)
    assert "datum 20" in str(result.error)
    assert_same_bits(a.grads, before)


def test_work_is_cut_finer_than_a_micro_batch(store: ModelStore) -> None:
    (a,) = create(store, "a")
    queue = TrainingQueue(LIMITS)
    queue.add(0, a, batch(50))
    steps = 0
    while len(queue):
        queue.step()
        steps += 1
    assert steps >= 2 * a.base.config.num_layers


def test_grad_mode_is_as_it_was_between_steps(store: ModelStore) -> None:
    (a,) = create(store, "a")
    queue = TrainingQueue(LIMITS)
    queue.add(0, a, batch(50))
    while len(queue):
        queue.step()
        assert torch.is_grad_enabled()


def test_micro_batches_keep_to_both_limits() -> None:
    data = batch(10, 20, 30, 80, 5).data

    def cut(**limits: int) -> list[tuple[tuple[int, ...], bool]]:
        return [
            (m.indices, m.recompute) for m in micro_batches(data, Limits(**limits), KeptBytes(7, 3))
        ]

    assert cut(tokens=60) == [((0, 1, 2), False), ((3,), False), ((4,), False)]
    assert cut(tokens=60, activation_bytes=300) == [
        ((0, 1), False),
        ((2,), False),
        ((3,), True),
        ((4,), False),
    ]


def test_a_shared_prefix_counts_once_in_a_micro_batch() -> None:
    prompt, *samples = (datum.tokens for datum in batch(48, *[22] * 5, seed=3).data)
    data = [Datum(np.concatenate([prompt, sample]), {}) for sample in samples]

    def cut(tokens: int, activation_bytes: int = 10**6) -> list[tuple[tuple[int, ...], int]]:
        limits = Limits(tokens, activation_bytes)
        return [(m.indices, m.num_rows) for m in micro_batches(data, limits, KeptBytes(7, 3))]

    assert cut(160) == [((0, 1, 2, 3, 4), 158)]
    assert cut(66) == [((0, 1, 2, 3), 136), ((4,), 70)]  # 66 rows beyond the first datum's
    assert cut(160, 7 * 92 + 3 * 140) == [((0, 1), 92), ((2, 3), 92), ((4,), 70)]
    whole = micro_batches(data, Limits(150), KeptBytes(7, 3), shares=False)
    assert [(m.indices, m.num_rows) for m in whole] == [((0, 1), 140), ((2, 3), 140), ((4,), 70)]


def test_a_pass_that_shares_nothing_gets_no_more_rows_than_it_may(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,) = create(store, "a")
    prompt, *samples = (datum.tokens for datum in batch(50, *[20] * 5, seed=3).data)
    data = [replace(supervised(70, 0), tokens=np.concatenate([prompt, s])) for s in samples]
    queue = TrainingQueue(Limits(150))
    work = TrainBatch(tuple(data), "cross_entropy")
    for plain in (False, True):
        if plain:
            monkeypatch.setattr(BaseModel, "is_llama_family", False)
        queue.add(0, a, work)
    assert [len(job.waiting) for job in queue._jobs] == [1, 3]


def test_datums_with_a_common_prefix_are_computed_together_and_answered_in_order(
    store: ModelStore,
) -> None:
    (a,) = create(store, "a")
    first, second = (datum.tokens for datum in batch(32, 32, seed=5).data)
    data = []
    for i, (prompt, sample) in enumerate(
        zip((first, second) * 3, batch(*range(4, 10)).data, strict=True)
    ):
        tokens = np.concatenate([prompt, sample.tokens])
        data.append(replace(supervised(len(tokens), i), tokens=tokens))
    work = TrainBatch(tuple(data), "cross_entropy")
    cut = [m.indices for m in micro_batches(data, Limits(60), a.kept_bytes())]
    assert cut == [(0, 2, 4), (1, 3, 5)]
    for datum, together in zip(data, outputs_of(a, work, Limits(60)), strict=True):
        (by_itself,) = outputs_of(a, TrainBatch((datum,), "cross_entropy"), LIMITS)
        np.testing.assert_allclose(together, by_itself, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_compiled", [True, False], ids=("compiled", "PyTorch"))
def test_the_estimate_of_kept_bytes_is_a_close_upper_bound(
    store: ModelStore, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against what a pass really keeps: all tensors that its saved blocks hold."""
    if not is_compiled:
        for module in (micro_batch_pass, trainable_model):
            monkeypatch.setattr(module, "has_compiled_pass", lambda *_: False)
    elif library() is None:
        pytest.skip("there is no C compiler")
    (a,) = create(store, "a")
    storages: dict[int, int] = {}
    held: list[object] = []
    kind = CompiledBlocks if is_compiled else TorchBlocks
    forward = kind.forward

    def watched(self, index, x, *, keep):
        out, saved = forward(self, index, x, keep=keep)
        kept = [saved.x, saved.mixed, saved.middle, saved.gates, *(saved.heads or ())]
        if isinstance(saved.attention, tuple):
            kept += saved.attention
        else:
            kept += [t for each in saved.attention for t in (*each.inputs, each.out)]
        for tensor in kept:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        held.append(saved)
        return out, saved

    monkeypatch.setattr(kind, "forward", watched)
    alone(a, batch(37, 27))
    real = sum(storages.values()) / (37 + 27)
    each = a.kept_bytes()
    estimate = each.row + each.token
    assert 0.6 * estimate < real <= 1.1 * estimate
