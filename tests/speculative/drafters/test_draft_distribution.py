"""The distributions that drafts report, which of them are any, and which drafts report them."""

import numpy as np
import pytest
import torch

from tinkercloud.speculative.drafters.draft_distribution import (
    AUDIT_EVERY,
    AuditSchedule,
    DraftDistribution,
)

V = 8


def distribution(ids, probs) -> DraftDistribution:
    return DraftDistribution(np.array(ids, np.int32), np.array(probs, np.float32))


def test_a_law_keeps_what_can_be_drawn_by_the_targets_numbers():
    probs = torch.tensor([0.25, 0.0, 0.75])
    whole = DraftDistribution.of(probs)
    assert whole.ids.tolist() == [0, 2] and whole.probs.tolist() == [0.25, 0.75]
    trimmed = DraftDistribution.of(probs, torch.tensor([1, 4, 6]))
    assert trimmed.ids.tolist() == [1, 6]
    assert trimmed.dense(V).tolist() == [0, 0.25, 0, 0, 0, 0, 0.75, 0]
    assert (trimmed.ids.dtype, trimmed.probs.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize(
    ("ids", "probs"),
    [
        ([], []),
        ([1, 2], [1.0]),
        ([1, 2], [0.5, 0.4]),
        ([1, 2], [0.5, np.nan]),
        ([1, 2], [1.0, np.inf]),
        ([1, 2], [1.5, -0.5]),
        ([2, 1], [0.5, 0.5]),
        ([1, 1], [0.5, 0.5]),
        ([-1, 1], [0.5, 0.5]),
        ([1, V], [0.5, 0.5]),
        ([2, 3], [0.5, 0.5]),
        ([0, 1], [1.0, 0.0]),
        ([0], [1.0]),
    ],
)
def test_what_is_no_law_or_cannot_give_the_token_is_seen(ids, probs):
    assert not distribution(ids, probs).can_give(1, V)


def test_a_law_may_be_rounded():
    assert distribution([1, V - 1], [0.5, 0.5005]).can_give(1, V)
    assert not distribution([1, V - 1], [0.5, 0.502]).can_give(1, V)


@pytest.mark.parametrize(
    "wrong",
    [
        DraftDistribution([1], [1.0]),
        DraftDistribution(np.array([1.0]), np.array([1.0])),
        DraftDistribution(np.array([1]), np.array([1])),
        DraftDistribution(np.array([[1]]), np.array([[1.0]])),
        DraftDistribution(np.array([1], object), np.array([1.0])),
        DraftDistribution(None, None),
    ],
)
def test_arrays_of_another_form_are_refused(wrong):
    with pytest.raises(TypeError):
        wrong.can_give(1, V)


@pytest.mark.parametrize("at_once", [1, 2, 3, 8, 64, 128])
def test_about_one_draft_in_a_hundred_is_audited_and_every_sample_in_turn(at_once):
    schedule = AuditSchedule()
    rounds = 20 * AUDIT_EVERY
    taken = [schedule.takes(1.0) for _ in range(rounds * at_once)]
    assert 0.009 < np.mean(taken) < 0.011
    by_sample = np.array(taken).reshape(rounds, at_once).sum(0)
    assert (by_sample == 20).all()


def test_where_nothing_is_drawn_nothing_is_audited():
    schedule = AuditSchedule(2)
    assert [schedule.takes(t) for t in (0.0, 1.0, 0.0, 0.7, 0.0, 1.0)] == [
        False, False, False, True, False, False,
    ]  # fmt: skip
