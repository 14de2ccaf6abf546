"""Drafts that follow a policy: what training does to them, and that the policy stays as it is."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.numerics.tiny import open_store, random_prompt, write_tiny_model
from tests.speculative.head_scene import V
from tests.speculative.toy_policy import ToyPolicy, student_of
from tinkercloud.core.types import FromBase, LoraSpec
from tinkercloud.embedded.draft_capture import capture
from tinkercloud.embedded.draft_fit import Fit, Plan, assign, copied, gradients, joined
from tinkercloud.embedded.draft_material import CapturedSequences, Lessons, Mix
from tinkercloud.embedded.draft_training import DraftTrainer, DraftTraining, Gate
from tinkercloud.embedded.head_student import CapturedSequence, HeadStudent, HeadTraining, Told
from tinkercloud.embedded.model_student import Lesson, ModelStudent, ModelTraining
from tinkercloud.embedded.versions import Version
from tinkercloud.errors import NotFound, UserError
from tinkercloud.speculative.cases import Case, CaseStore, digest
from tinkercloud.speculative.draft_folder import DraftFolder
from tinkercloud.speculative.draft_vocabulary import DraftVocabulary
from tinkercloud.speculative.head import FrozenRows, Head, HeadConfig, fresh_params
from tinkercloud.speculative.pacing import TimeBudget, TriggerSettings

RATE = 1e-2
ROOM = 1 << 26


class Clock:
    """Every look at it is a second later."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def endless() -> TimeBudget:
    budget = TimeBudget(1.0, 1e9)
    budget.step_took(1e9)
    return budget


def fitted(student, material, num_steps: int = 100) -> list[float]:
    fit = Fit(student, material.batch, Plan(num_steps=num_steps, peak_rate=RATE))
    fit.advance(endless())
    return fit.losses


def filled(policy: ToyPolicy, count: int = 48, **mix: object) -> CapturedSequences:
    material = CapturedSequences(ROOM, 4, Mix(**mix))
    for sequence in policy.sequences(count, 0):
        material.add(sequence)
    return material


@pytest.fixture(scope="module")
def taught() -> tuple[ToyPolicy, HeadStudent]:
    """A policy, and a head that has learned to draft for it."""
    policy = ToyPolicy(0)
    student = student_of(policy.weights)
    fitted(student, filled(policy))
    return policy, student


def trainer_of(
    student: HeadStudent, material: object, folder: Path, **training: object
) -> DraftTrainer:
    given = {"plan": Plan(num_steps=50, peak_rate=RATE)} | training
    return DraftTrainer(student, material, DraftFolder(folder), endless(), DraftTraining(**given))


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def copy_of(student: HeadStudent, policy: ToyPolicy) -> HeadStudent:
    other = student_of(policy.weights)
    assign(other, student.params)
    return other


# ---- heads


@pytest.mark.parametrize("measure", ["forward_kl", "reverse_kl", "lk"])
def test_a_head_learns_what_its_policy_will_say(measure):
    policy = ToyPolicy(0)
    student = student_of(policy.weights, HeadTraining(measure=measure))
    held = policy.sequences(8, 9000)
    before = student.evaluate(held)
    losses = fitted(student, filled(policy))
    after = student.evaluate(held)
    assert losses[-1] < 0.5 * losses[0]
    assert after.mean > 2 * before.mean
    assert all(a > b for a, b in zip(after.by_depth, before.by_depth, strict=True))


def test_a_head_unrolled_on_its_own_outputs_drafts_deeper_than_one_that_was_not():
    policy = ToyPolicy(0)
    depths = {}
    for num_steps in (1, 3):
        student = student_of(policy.weights, HeadTraining(num_steps=num_steps))
        fitted(student, filled(policy))
        judge = student_of(policy.weights, HeadTraining(num_steps=3))
        assign(judge, student.params)
        depths[num_steps] = judge.evaluate(policy.sequences(8, 9000)).by_depth
    assert depths[3][2] > depths[1][2] + 0.05


def test_acceptance_rises_on_a_planted_shift_within_fifty_steps(taught, tmp_path):
    policy, student = taught
    shifted = ToyPolicy(1)
    student = copy_of(student, policy)
    material = filled(policy)
    for sequence in shifted.sequences(48, 500, epoch=1):
        material.add(sequence)
    trainer = trainer_of(student, material, tmp_path)
    trainer.policy_stepped(1, 10.0)
    outcome = trainer.work()
    assert outcome is not None
    assert len(outcome.losses) == 50
    assert outcome.promoted
    assert outcome.after.by_depth[0] > outcome.before.by_depth[0] + 0.1
    assert DraftFolder(tmp_path).resolve("best") == outcome.version


def test_replay_keeps_what_was_known_of_the_old_task():
    """The new task has nothing in common with the old one: for some steps it costs more than two
    points of acceptance there, which a fifth of replay then wins back."""
    low, high = ToyPolicy(0, range(30)), ToyPolicy(1, range(30, V))
    learned = student_of(low.weights)
    fitted(learned, filled(low, seed=1), 80)
    held = low.sequences(8, 9000)
    known = learned.evaluate(held).by_depth[0]
    kept = {}
    for share in (0.8, 1.0):
        student = copy_of(learned, low)
        material = filled(low, share=share, batch_size=10)
        for sequence in high.sequences(48, 500, epoch=1):
            material.add(sequence)
        fitted(student, material, 150)
        kept[share] = student.evaluate(held).by_depth[0]
        assert student.evaluate(high.sequences(8, 9500)).by_depth[0] > 0.5
    assert kept[0.8] > known - 0.02
    assert kept[1.0] < known - 0.2  # without it, the test would see the loss


def test_expected_tokens_of_a_draft_are_those_that_counting_its_steps_gives(taught):
    policy, student = taught
    (sequence,) = policy.sequences(1, 77)
    found = student.evaluate([sequence])
    three = student_of(policy.weights, HeadTraining(num_steps=3))
    assign(three, student.params)
    alphas = []
    for step in range(3):
        shallow = student_of(policy.weights, HeadTraining(num_steps=step + 1))
        assign(shallow, student.params)
        alphas.append(shallow.evaluate([sequence]).per_row)
    # What one step more adds can only be what the step before has left.
    assert (np.diff(np.array(alphas), axis=0) <= alphas[0] + 1e-9).all()
    assert (np.diff(np.array(alphas), axis=0) >= -1e-9).all()
    assert np.allclose(found.per_row, alphas[2])


def test_a_batch_is_the_sum_of_its_sequences(taught):
    policy, student = taught
    sequences = [policy.sequence(1), policy.sequence(2, temperature=0.7)]
    short = sequences[1]
    sequences[1] = CapturedSequence(
        short.tokens[:9], short.hidden[:9], short.top_ids[:9], short.top_probs[:9],
        short.weights[:9], short.temperature, short.epoch,
    )  # fmt: skip
    together = student.evaluate(sequences)
    apart = joined([student.evaluate([s]) for s in sequences])
    assert np.allclose(together.per_row, apart.per_row, atol=1e-5)


# ---- the policy stays as it is


def test_no_gradient_reaches_the_policy(folder_of_tiny):
    """The policy's own loss and the head's, on one tape: the policy's gradient is bitwise the one
    it has without the head."""
    version = tiny_version(folder_of_tiny)
    weights = version.base.weights
    for tensor in weights.values():
        tensor.requires_grad_()
    head = head_of(version)
    student = HeadStudent(head, fresh_params(head.config, 0), HeadTraining())
    tokens = torch.tensor(random_prompt(12, 0))
    x = weights["model.embed_tokens"][tokens]
    hidden = torch.stack([x @ weights["model.layers.0.self_attn.o_proj"].T] * 2, 1)
    logits = x @ weights["lm_head"].T
    own = torch.logsumexp(logits, -1).sum()
    alone = torch.autograd.grad(own, list(weights.values()), allow_unused=True, retain_graph=True)
    captured = CapturedSequence.of(tokens, hidden, logits, Told(1, 1.0, 0, count=16))
    loss = student.loss([captured])
    both = torch.autograd.grad(own + loss, list(weights.values()), allow_unused=True)
    for a, b in zip(alone, both, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    _, grads = gradients(student, [captured])
    assert all(grads[n].abs().max() > 0 for n in grads)
    assert grads.keys() == student.params.keys()
    assert all(tensor.grad is None for tensor in weights.values())


def test_training_leaves_the_policys_weights_bitwise_unchanged(folder_of_tiny):
    version = tiny_version(folder_of_tiny)
    before = copied(version.base.weights)
    head = head_of(version)
    student = HeadStudent(head, fresh_params(head.config, 0), HeadTraining())
    material = CapturedSequences(ROOM, 4, Mix(batch_size=4))
    for seed in range(12):
        tokens = np.array(random_prompt(20, seed), np.int32)
        material.add(capture(version, tokens, head.config.layers, Told(4, 1.0, 0)))
    losses = fitted(student, material, 15)
    assert losses[-1] < losses[0]
    assert same_bits(version.base.weights, before)


def test_a_captured_law_is_the_policys(folder_of_tiny):
    version = tiny_version(folder_of_tiny)
    tokens = np.array(random_prompt(9, 3), np.int32)
    captured = capture(version, tokens, (1, 2), Told(3, 0.7, 5, count=4))
    assert captured.hidden.shape == (9, 2, 48)
    assert captured.weights.tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1]
    logits = torch.from_numpy(captured.hidden[:, -1]) @ version.base.weights["lm_head"].T
    law = torch.softmax(logits / 0.7, -1)
    told = law.gather(-1, torch.from_numpy(captured.top_ids).long())
    torch.testing.assert_close(told, torch.from_numpy(captured.top_probs))


# ---- gate, publication, rollback, budget


class Poisoned:
    """Batches of another policy than the one that is held out."""

    def __init__(self, right: ToyPolicy, wrong: ToyPolicy):
        self._right, self._wrong = right, wrong

    def batch(self, number: int) -> list[CapturedSequence]:
        return self._wrong.sequences(8, 8 * number)

    def held_out(self) -> list[list[CapturedSequence]]:
        return [self._right.sequences(8, 9000)]


def test_the_gate_refuses_a_worse_draft(taught, tmp_path):
    policy, student = taught
    student = copy_of(student, policy)
    trainer = trainer_of(student, Poisoned(policy, ToyPolicy(1)), tmp_path)
    first = trainer.publish({})
    before = copied(trainer.served)
    outcome = trainer.work("now")
    assert outcome is not None
    assert not outcome.promoted
    assert outcome.after.mean < outcome.before.mean
    assert same_bits(trainer.served, before)
    folder = DraftFolder(tmp_path)
    assert folder.resolve("best") == first
    assert folder.resolve("latest") == outcome.version
    assert folder.notes("latest")["promoted"] is False


def test_the_gate_does_not_open_on_too_few_places(taught, tmp_path):
    policy, _ = taught
    trainer = trainer_of(
        student_of(policy.weights), filled(policy), tmp_path, gate=Gate(least_rows=10**6)
    )
    outcome = trainer.work("now")
    assert outcome is not None
    assert outcome.after.mean > outcome.before.mean
    assert not outcome.promoted


def test_rollback_restores_every_bit(tmp_path):
    policy = ToyPolicy(0)
    trainer = trainer_of(student_of(policy.weights), filled(policy), tmp_path)
    first = trainer.publish({})
    before = copied(trainer.served)
    outcome = trainer.work("now")
    assert outcome is not None
    assert outcome.promoted
    trained = copied(trainer.served)
    assert not same_bits(trained, before)
    assert trainer.rollback() == first
    assert same_bits(trainer.served, before)
    trainer.use("latest")
    assert same_bits(trainer.served, trained)
    trainer.use(first)
    with pytest.raises(NotFound, match="no draft before it"):
        trainer.rollback()


def test_a_draft_of_another_model_is_refused(taught, tmp_path):
    policy, student = taught
    student.write(student.params, tmp_path)
    config = HeadConfig.of(student._head.config.target, (1, 4))
    other = Head(config, student._head.frozen)
    with pytest.raises(UserError, match="not one of this model"):
        HeadStudent(other, fresh_params(config, 0), HeadTraining()).read(tmp_path)
    trimmed = FrozenRows.of(policy.weights, DraftVocabulary.of(range(9), V))
    small = HeadStudent(Head(student._head.config, trimmed), student.params, HeadTraining())
    with pytest.raises(UserError, match="another vocabulary"):
        small.read(tmp_path)


def test_what_is_served_does_not_move_while_a_draft_is_trained(tmp_path):
    policy = ToyPolicy(0)
    clock = Clock()
    budget = TimeBudget(0.1, clock=clock)
    trainer = DraftTrainer(
        student_of(policy.weights), filled(policy), DraftFolder(tmp_path), budget,
        DraftTraining(plan=Plan(num_steps=6, peak_rate=RATE)),
    )  # fmt: skip
    before = copied(trainer.served)
    policy_s, outcomes = 0.0, []
    for step in range(1, 12):
        trainer.policy_stepped(step, 10.0)
        policy_s += 10.0
        outcomes.append(trainer.work())
        # Every piece of work takes a second here: one step at a time is what fits.
        assert budget.spent_s <= 0.1 * policy_s + 1.0
        if not any(outcomes):
            assert same_bits(trainer.served, before)
    done = [o for o in outcomes if o is not None]
    assert len(done) == 1
    assert done[0].reason == "1 policy steps"
    assert not same_bits(trainer.served, before)


def test_nothing_is_trained_without_time_or_without_something_held_out(taught, tmp_path):
    policy, _ = taught
    empty = CapturedSequences(ROOM, 4, Mix())
    assert trainer_of(student_of(policy.weights), empty, tmp_path).work("now") is None
    trainer = DraftTrainer(
        student_of(policy.weights), filled(policy), DraftFolder(tmp_path),
        TimeBudget(), DraftTraining(),
    )  # fmt: skip
    assert trainer.work("now") is None
    assert DraftFolder(tmp_path).versions() == []


def test_a_fall_of_acceptance_starts_a_training(tmp_path):
    policy = ToyPolicy(0)
    trainer = trainer_of(
        student_of(policy.weights), filled(policy), tmp_path,
        trigger=TriggerSettings(every_steps=0, fall=0.03, decay=0.5),
        plan=Plan(num_steps=2),
    )  # fmt: skip
    for step, acceptance in enumerate((0.6, 0.6, 0.58)):
        trainer.policy_stepped(step, 10.0, acceptance)
        assert trainer.work() is None
    trainer.policy_stepped(3, 10.0, 0.5)
    outcome = trainer.work()
    assert outcome is not None
    assert outcome.reason.startswith("acceptance fell from 0.600")
    trainer.policy_stepped(4, 10.0, 0.5)
    assert trainer.work() is None


def test_a_training_that_breaks_off_leaves_what_is_served(taught, tmp_path):
    policy, student = taught
    broken = policy.sequence(0)
    broken.hidden[3] = np.nan

    class Broken(Poisoned):
        def batch(self, number: int) -> list[CapturedSequence]:
            return [broken]

    trainer = trainer_of(copy_of(student, policy), Broken(policy, policy), tmp_path)
    before = copied(trainer.served)
    with pytest.raises(UserError, match="not finite"):
        trainer.work("now")
    assert same_bits(trainer.served, before)


# ---- material


def test_what_is_held_out_is_never_taught_and_is_the_newest():
    policy = ToyPolicy(0)
    material = filled(policy)
    for sequence in policy.sequences(40, 300, epoch=2):
        material.add(sequence)
    held = {digest(s.tokens) for batch in material.held_out() for s in batch}
    assert held
    assert all(s.epoch == 2 for batch in material.held_out() for s in batch)
    drawn = [s for i in range(40) for s in material.batch(i)]
    assert not held & {digest(s.tokens) for s in drawn}
    assert sum(s.epoch == 2 for s in drawn) / len(drawn) == pytest.approx(0.8, abs=0.06)
    again = [s for i in range(40) for s in material.batch(i)]
    assert all(a is b for a, b in zip(drawn, again, strict=True))


def test_captured_sequences_stay_within_their_bytes_and_age():
    policy = ToyPolicy(0)
    size = policy.sequence(0).num_bytes
    material = CapturedSequences(16 * size, 2, Mix())
    for epoch in range(8):
        for sequence in policy.sequences(20, 100 * epoch, epoch):
            material.add(sequence)
        assert material.num_bytes <= 16 * size
    oldest = {s.epoch for i in range(30) for s in material.batch(i)}
    assert oldest <= {5, 6, 7}


# ---- small models


@pytest.fixture(scope="module")
def folder_of_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def tiny_version(folder: Path) -> Version:
    store = open_store(folder)
    return store.version(store.publish(FromBase("tiny")))


def head_of(version: Version) -> Head:
    config = HeadConfig.of(version.base.config)
    vocabulary = DraftVocabulary.of(range(0, 260, 2), 260)
    return Head(config, FrozenRows.of(version.base.weights, vocabulary))


def lessons_of(target: Version, count: int) -> Iterator[tuple[np.ndarray, Case]]:
    """Cases of a target that says other things than the draft would."""
    for seed in range(count):
        tokens = np.array(random_prompt(14, seed), np.int32)
        captured = capture(target, tokens, (2,), Told(1, 0.8, 0, count=8))
        for position in range(6, 12):
            law = captured.top_probs[position - 1]
            ids = captured.top_ids[position - 1]
            said = int(ids[0])
            drafted = said if seed % 3 == 0 else int(ids[1])
            name = digest(tokens)
            yield tokens, Case(name, position, drafted, said, ids, law, 0.8, "v", 0)


@pytest.fixture(scope="module")
def small_model(folder_of_tiny, tmp_path_factory) -> tuple[Version, CaseStore]:
    """A draft's model, and what it got wrong about a target of other weights."""
    store = CaseStore(ROOM, 4)
    target = tiny_version(write_tiny_model(tmp_path_factory.mktemp("target"), seed=1))
    for tokens, case in lessons_of(target, 24):
        store.add(tokens, case)
    return tiny_version(folder_of_tiny), store


def test_a_small_model_learns_from_its_disagreements(small_model, tmp_path):
    version, store = small_model
    before = copied(version.base.weights)
    student = ModelStudent(version.base, LoraSpec(4, 0, train_unembed=False), ModelTraining())
    material = Lessons(store, Mix(batch_size=16))
    trainer = DraftTrainer(
        student, material, DraftFolder(tmp_path), endless(),
        DraftTraining(Plan(num_steps=30, peak_rate=RATE, accumulate=2), gate=Gate(least_rows=4)),
    )  # fmt: skip
    first = trainer.publish({})
    outcome = trainer.work("now")
    assert outcome is not None
    assert outcome.losses[-1] < outcome.losses[0]
    assert same_bits(version.base.weights, before)
    assert trainer.use(first) == first
    assert all(not t.any() for n, t in trainer.served.items() if n.endswith("lora_B"))


def test_lessons_of_one_context_are_those_that_each_alone_would_be(small_model):
    version, store = small_model
    student = ModelStudent(version.base, LoraSpec(4, 0), ModelTraining())
    lessons = [Lesson(store.tokens(case), case) for case in list(store.disagreed)[:9]]
    together = student.evaluate(lessons).per_row
    apart = [student.evaluate([lesson]).per_row[0] for lesson in lessons]
    assert np.allclose(together, apart, atol=1e-5)


def test_a_disagreement_weighs_more_than_an_agreed_case(small_model):
    version, store = small_model
    pair = [
        Lesson(store.tokens(case), case)
        for case in (next(iter(store.disagreed)), next(iter(store.agreed)))
    ]
    losses = {}
    for weight in (1.0, 3.0):
        training = ModelTraining(disagreed_weight=weight)
        student = ModelStudent(version.base, LoraSpec(4, 0), training)
        each = [float(student.loss([lesson]).detach()) for lesson in pair]
        losses[weight] = float(student.loss(pair).detach())
        expected = (weight * each[0] + each[1]) / (weight + 1)
        assert losses[weight] == pytest.approx(expected, rel=1e-4)


# ---- the schedule


def test_rates_rise_linearly_and_fall_along_a_cosine():
    plan = Plan(num_steps=25, peak_rate=1.0, warmup_steps=5, least_share=0.1)
    rates = [plan.rate(step) for step in range(25)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[15] == pytest.approx(0.55)
    assert all(a >= b for a, b in pairwise(rates[4:]))
    assert plan.rate(1000) == pytest.approx(0.1)


def test_accumulated_batches_step_as_their_mean_does(taught):
    policy, _ = taught
    batches = [policy.sequences(4, 0), policy.sequences(4, 50)]
    ends = []
    for batches_of, count in ((lambda n: batches[n], 2), (lambda n: batches[0] + batches[1], 1)):
        student = student_of(policy.weights)
        Fit(student, batches_of, Plan(num_steps=1, accumulate=count)).advance(endless())
        ends.append(student.params)
    for name in ends[0]:
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=1e-3, atol=1e-5)
