"""When a draft is trained, whether it is used, how it is undone."""

from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.embedded.draft_training.toy_policy import (
    RATE,
    ROOM_BYTES,
    ToyPolicy,
    copy_of,
    endless,
    filled,
    same_bits,
    trainer_of,
)
from tests.speculative.head.head_scene import (
    V,
)
from tinkercloud.embedded.draft_training.capture import CapturedSequence
from tinkercloud.embedded.draft_training.dataset import Mix, SequenceDataset
from tinkercloud.embedded.draft_training.driver import Gate, TrainingDriver, TrainingSettings
from tinkercloud.embedded.draft_training.fit import Fit, Plan, copied
from tinkercloud.embedded.draft_training.head_trainer import HeadObjective, HeadTrainer
from tinkercloud.errors import NotFound, UserError
from tinkercloud.speculative.head.head import FrozenRows, Head, HeadConfig, initial_params
from tinkercloud.speculative.head.vocabulary import DraftVocabulary
from tinkercloud.speculative.learning.draft_folder import DraftFolder
from tinkercloud.speculative.learning.schedule import TimeBudget, TriggerSettings


class Clock:
    """Every look at it is a second later."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def driver_of(
    trainer: HeadTrainer, dataset: object, folder: Path, **training: object
) -> TrainingDriver:
    settings = {"plan": Plan(num_steps=50, peak_rate=RATE)} | training
    return TrainingDriver(
        trainer, dataset, DraftFolder(folder), endless(), TrainingSettings(**settings)
    )


def test_acceptance_rises_on_a_planted_shift_within_fifty_steps(trained_head, tmp_path):
    policy, trainer = trained_head
    shifted = ToyPolicy(1)
    trainer = copy_of(trainer, policy)
    dataset = filled(policy)
    for sequence in shifted.sequences(48, 500, epoch=1):
        dataset.add(sequence)
    driver = driver_of(trainer, dataset, tmp_path)
    driver.policy_stepped(1, 10.0)
    result = driver.work()
    assert result is not None
    assert len(result.losses) == 50
    assert result.promoted
    assert result.after.by_depth[0] > result.before.by_depth[0] + 0.1
    assert DraftFolder(tmp_path).resolve("best") == result.version


# ---- gate, publication, rollback, budget


class Poisoned:
    """Batches of another policy than the one that is held out."""

    def __init__(self, right: ToyPolicy, wrong: ToyPolicy):
        self._right, self._wrong = right, wrong

    def batch(self, number: int) -> list[CapturedSequence]:
        return self._wrong.sequences(8, 8 * number)

    def held_out(self) -> list[list[CapturedSequence]]:
        return [self._right.sequences(8, 9000)]


def test_the_gate_refuses_a_worse_draft(trained_head, tmp_path):
    policy, trainer = trained_head
    trainer = copy_of(trainer, policy)
    driver = driver_of(trainer, Poisoned(policy, ToyPolicy(1)), tmp_path)
    first = driver.publish({})
    before = copied(driver.served)
    result = driver.work("now")
    assert result is not None
    assert not result.promoted
    assert result.after.mean < result.before.mean
    assert same_bits(driver.served, before)
    folder = DraftFolder(tmp_path)
    assert folder.resolve("best") == first
    assert folder.resolve("latest") == result.version
    assert folder.notes("latest")["promoted"] is False


def test_the_gate_does_not_open_on_too_few_places(trained_head, tmp_path):
    policy, _ = trained_head
    driver = driver_of(
        trainer_of(policy.weights), filled(policy), tmp_path, gate=Gate(least_rows=10**6)
    )
    result = driver.work("now")
    assert result is not None
    assert result.after.mean > result.before.mean
    assert not result.promoted


def test_rollback_restores_every_bit(tmp_path):
    policy, folder = ToyPolicy(0), DraftFolder(tmp_path)
    driver = driver_of(trainer_of(policy.weights), filled(policy), tmp_path)
    first = driver.publish({})
    before = copied(driver.served)
    result = driver.work("now")
    assert result is not None
    assert result.promoted
    trained = copied(driver.served)
    assert not same_bits(trained, before)
    assert driver.use(folder.rollback()) == first
    assert same_bits(driver.served, before)
    driver.use("latest")
    assert same_bits(driver.served, trained)
    driver.use(first)
    with pytest.raises(NotFound, match="no draft before it"):
        folder.rollback()


def test_a_draft_of_another_model_is_refused(trained_head, tmp_path):
    policy, trainer = trained_head
    trainer.write(trainer.params, tmp_path)
    config = HeadConfig.of(trainer._head.config.target, (1, 4))
    other = Head(config, trainer._head.frozen)
    with pytest.raises(UserError, match="not one of this model"):
        HeadTrainer(other, initial_params(config, 0), HeadObjective()).read(tmp_path)
    trimmed = FrozenRows.of(policy.weights, DraftVocabulary.of(range(9), V))
    small = HeadTrainer(Head(trainer._head.config, trimmed), trainer.params, HeadObjective())
    with pytest.raises(UserError, match="another vocabulary"):
        small.read(tmp_path)


def test_the_served_draft_does_not_change_while_another_is_trained(tmp_path):
    policy = ToyPolicy(0)
    clock = Clock()
    budget = TimeBudget(0.1, clock=clock)
    driver = TrainingDriver(
        trainer_of(policy.weights), filled(policy), DraftFolder(tmp_path), budget,
        TrainingSettings(plan=Plan(num_steps=6, peak_rate=RATE)),
    )  # fmt: skip
    before = copied(driver.served)
    policy_s, results = 0.0, []
    for step in range(1, 12):
        driver.policy_stepped(step, 10.0)
        policy_s += 10.0
        results.append(driver.work())
        # Every piece of work takes a second here: one step at a time is what fits.
        assert budget.spent_s <= 0.1 * policy_s + 1.0
        if not any(results):
            assert same_bits(driver.served, before)
    done = [o for o in results if o is not None]
    assert len(done) == 1
    assert done[0].reason == "1 policy steps"
    assert not same_bits(driver.served, before)


def test_nothing_is_trained_without_time_or_without_held_out_sequences(trained_head, tmp_path):
    policy, _ = trained_head
    empty = SequenceDataset(ROOM_BYTES, 4, Mix())
    assert driver_of(trainer_of(policy.weights), empty, tmp_path).work("now") is None
    driver = TrainingDriver(
        trainer_of(policy.weights), filled(policy), DraftFolder(tmp_path),
        TimeBudget(), TrainingSettings(),
    )  # fmt: skip
    assert driver.work("now") is None
    assert DraftFolder(tmp_path).versions() == []


def test_a_fall_of_acceptance_starts_a_training(tmp_path):
    policy = ToyPolicy(0)
    driver = driver_of(
        trainer_of(policy.weights), filled(policy), tmp_path,
        trigger=TriggerSettings(every_steps=0, fall=0.03, decay=0.5),
        plan=Plan(num_steps=2),
    )  # fmt: skip
    for step, acceptance in enumerate((0.6, 0.6, 0.58)):
        driver.policy_stepped(step, 10.0, acceptance)
        assert driver.work() is None
    driver.policy_stepped(3, 10.0, 0.5)
    result = driver.work()
    assert result is not None
    assert result.reason.startswith("acceptance fell from 0.600")
    driver.policy_stepped(4, 10.0, 0.5)
    assert driver.work() is None


def test_a_training_that_breaks_off_leaves_the_served_draft(trained_head, tmp_path):
    policy, trainer = trained_head
    broken = policy.sequence(0)
    broken.hidden[3] = np.nan

    class Broken(Poisoned):
        def batch(self, number: int) -> list[CapturedSequence]:
            return [broken]

    driver = driver_of(copy_of(trainer, policy), Broken(policy, policy), tmp_path)
    before = copied(driver.served)
    with pytest.raises(UserError, match="not finite"):
        driver.work("now")
    assert same_bits(driver.served, before)


# ---- the schedule


def test_rates_rise_linearly_and_fall_along_a_cosine():
    plan = Plan(num_steps=25, peak_rate=1.0, warmup_steps=5, least_share=0.1)
    rates = [plan.rate(step) for step in range(25)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[15] == pytest.approx(0.55)
    assert all(a >= b for a, b in pairwise(rates[4:]))
    assert plan.rate(1000) == pytest.approx(0.1)


def test_accumulated_batches_step_as_their_mean_does(trained_head):
    policy, _ = trained_head
    batches = [policy.sequences(4, 0), policy.sequences(4, 50)]
    ends = []
    for batches_of, count in ((lambda n: batches[n], 2), (lambda n: batches[0] + batches[1], 1)):
        trainer = trainer_of(policy.weights)
        Fit(trainer, batches_of, Plan(num_steps=1, accumulate=count)).advance(endless())
        ends.append(trainer.params)
    for name in ends[0]:
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=1e-3, atol=1e-5)


def test_a_training_in_parts_is_the_training(trained_head, tmp_path):
    policy, _ = trained_head
    found = []
    for in_parts in (False, True):
        trainer = trainer_of(policy.weights)
        plan = Plan(num_steps=5, peak_rate=RATE, accumulate=2)
        driver = driver_of(trainer, filled(policy, batch_size=4), tmp_path, plan=plan)
        trainer.loss = loss = Mock(wraps=trainer.loss)
        trainer.evaluate = evaluate = Mock(wraps=trainer.evaluate)
        result, num_calls = None, list[int]()
        while result is None:
            before = loss.call_count + evaluate.call_count
            result = driver.work("now", in_parts=in_parts)
            num_calls.append(loss.call_count + evaluate.call_count - before)
        found.append(result)
        if in_parts:
            assert max(num_calls) == 1 and len(num_calls) > 5 * 2 * 4  # 4 sequences a batch
        else:
            assert len(num_calls) == 1
    whole, parts = found
    assert parts.promoted == whole.promoted and len(parts.losses) == 5
    assert parts.losses == pytest.approx(whole.losses, rel=1e-3)
    assert parts.after.mean == pytest.approx(whole.after.mean, rel=1e-2)
    assert parts.before.mean == whole.before.mean


def test_samples_wait_for_a_training_only_where_quiet_time_had_none(trained_head, tmp_path):
    policy, _ = trained_head
    driver = TrainingDriver(
        trainer_of(policy.weights), filled(policy), DraftFolder(tmp_path), TimeBudget(0.5),
        TrainingSettings(plan=Plan(num_steps=2)),
    )  # fmt: skip

    def overdue_at(step: int) -> bool:
        driver.policy_stepped(step, 10.0)
        assert driver.is_due()
        return driver.is_overdue

    assert [overdue_at(step) for step in (1, 2, 3)] == [False, False, True]
    assert driver.work(quiet=True) is not None
    assert [overdue_at(step) for step in (4, 5)] == [False, False]
    assert driver.budget.is_overdue, "that is not what it waits for"
    assert overdue_at(6)
