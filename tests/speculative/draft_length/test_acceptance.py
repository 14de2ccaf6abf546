"""Calibrated acceptance against drafters whose true rates are known."""

from collections.abc import Hashable
from dataclasses import replace

import numpy as np
import pytest

from tinkercloud.speculative.draft_length.acceptance import Acceptance, Prior
from tinkercloud.speculative.draft_length.rounds import Round, Times

K = 4


def a_round(
    confidences: list[tuple[float, ...]],
    accepted: list[int],
    groups: tuple[Hashable, ...] = (),
    verified: list[int] | None = None,
    limit: int = K,
) -> Round:
    seen = verified if verified is not None else [len(draft) for draft in confidences]
    times = Times(0.0, 1.0)
    many = (limit,) * len(confidences)
    return Round(many, tuple(confidences), tuple(seen), tuple(accepted), times, groups=groups)


def drafts(rate: dict[float, float], num_rounds: int, seed: int = 0) -> list[Round]:
    """Drafts of K tokens, each of a confidence at random, whose rate is `rate[confidence]`."""
    coins = np.random.default_rng(seed)
    rounds = []
    for _ in range(num_rounds):
        draft = tuple(coins.choice(list(rate), K).tolist())
        rejected = [coins.random() >= rate[confidence] for confidence in draft]
        rounds.append(a_round([draft], [rejected.index(True) if True in rejected else K]))
    return rounds


def learned(rounds: list[Round], **prior: float) -> Acceptance:
    acceptance = Acceptance(K, Prior(**prior))
    for last_round in rounds:
        acceptance.learn([last_round])
    return acceptance


def survivals_of(
    acceptance: Acceptance,
    confidences: list[tuple[float, ...]],
    groups: tuple[Hashable, ...] = (),
) -> np.ndarray:
    """(B, K), 0 where there is no token."""
    survivals = np.zeros((len(confidences), K))
    for row, chances in zip(survivals, acceptance.survivals(confidences, groups), strict=True):
        row[: len(chances)] = chances
    return survivals


def test_a_drafter_that_is_too_sure_is_believed_as_far_as_it_was_right():
    rate = {0.99: 0.6, 0.5: 0.1}
    acceptance = learned(drafts(rate, 4000), memory=1e9)
    survivals = survivals_of(acceptance, [(0.99, 0.99), (0.5,), (0.99, 0.5)])
    assert survivals[0, :2] == pytest.approx([0.6, 0.36], abs=0.06)
    assert survivals[1, 0] == pytest.approx(0.1, abs=0.05)
    assert survivals[2, 1] == pytest.approx(0.06, abs=0.04)


def test_a_draft_that_is_cut_by_its_samples_end_has_no_rejected_token():
    last_round = replace(a_round([(0.9,) * K], [2]), ended=(True,))
    assert survivals_of(learned([last_round] * 500), [(0.9,) * K])[0, 1] > 0.95
    rejected = replace(last_round, ended=(False,))
    assert survivals_of(learned([rejected] * 500), [(0.9,) * K])[0, 2] < 0.05
    unknown = survivals_of(learned([last_round] * 500), [(0.9,) * K])[0, 2]
    assert unknown > 0.5  # nothing is known of it


def test_rates_equal_counting_where_there_is_much():
    rounds = drafts({0.99: 0.8, 0.5: 0.3}, 3000)
    acceptance = learned(rounds, memory=1e12)
    first = [(r.confidences[0][0], r.accepted[0] > 0) for r in rounds]
    counted = np.mean([accepted for confidence, accepted in first if confidence == 0.99])
    assert survivals_of(acceptance, [(0.99,)])[0, 0] == pytest.approx(counted, abs=0.005)


def test_what_fails_in_the_first_place_says_little_of_those_behind_it():
    """Half of the drafts fail at once, the others never; two tokens of each are verified."""
    confidences = [(0.9,) * K]
    rounds = [a_round(confidences, [accepted], verified=[2]) for accepted in (0, 2) * 100]
    survivals = survivals_of(learned(rounds), confidences)[0]
    assert survivals[0] == pytest.approx(0.5, abs=0.05)
    assert survivals[3] > 0.8 * survivals[1]  # what was seen of all places together is 0.67


def test_with_little_data_the_overall_rate_is_told():
    acceptance = learned([*drafts({0.99: 0.9}, 500), a_round([(0.9,)], [0])], memory=1e9)
    overall = acceptance.overall
    assert survivals_of(acceptance, [(0.7,)])[0, 0] == pytest.approx(overall)  # never seen
    assert survivals_of(acceptance, [(0.9,)])[0, 0] > 0.7  # one failure is not the rate


def test_until_they_are_counted_less_is_hoped_of_unsure_tokens():
    acceptance = Acceptance(K)
    hoped = survivals_of(acceptance, [(0.1,), (0.3,), (0.5,), (0.7,)])[:, 0]
    assert hoped == pytest.approx([0.1, 0.3, 0.5, 0.6])
    acceptance = learned(drafts({0.3: 0.9, 0.7: 0.2}, 500), memory=1e9)
    low, high = survivals_of(acceptance, [(0.3,), (0.7,)])[:, 0]
    assert low == pytest.approx(0.9, abs=0.05) and high == pytest.approx(0.2, abs=0.05)


def test_a_new_drafter_is_hoped_for():
    assert survivals_of(Acceptance(K), [(0.9, 0.9)])[0, :2] == pytest.approx([0.6, 0.36])


def test_survival_never_rises_with_depth_and_ends_with_the_draft():
    acceptance = learned(drafts({0.99: 0.9, 0.3: 0.2}, 300))
    survivals = survivals_of(acceptance, [(0.99, 0.3, 0.99), (), (0.99,) * K])
    assert (np.diff(survivals, axis=1) <= 0).all() and (survivals <= 1).all()
    assert survivals[0, 3] == 0 and not survivals[1].any() and survivals[2].all()


def test_what_was_counted_long_ago_fades():
    good, bad = drafts({0.99: 0.95}, 500), drafts({0.99: 0.1}, 500)
    assert learned(good + bad, memory=200.0).overall < 0.2
    assert learned(good + bad, memory=1e9).overall > 0.5


def test_tokens_that_were_not_verified_say_nothing():
    before = survivals_of(Acceptance(K), [(0.9,) * K])
    acceptance = learned([a_round([(0.9,) * K], [0], verified=[0])] * 50)
    assert (survivals_of(acceptance, [(0.9,) * K]) == before).all()


def test_tokens_behind_one_that_fell_say_nothing():
    acceptance = learned([a_round([(0.9, 0.9, 0.9, 0.9)], [1])] * 200, memory=1e9)
    rates = survivals_of(acceptance, [(0.9,) * K])[0]
    assert rates[0] > 0.95 and rates[1] / rates[0] < 0.05
    assert rates[2] / rates[1] == pytest.approx(rates[3] / rates[2])  # nothing known of either


def test_a_group_whose_drafts_stand_more_often_is_told_apart():
    acceptance = Acceptance(K)
    coins = np.random.default_rng(0)
    for _ in range(300):
        accepted = [int(coins.random() < rate) for rate in (0.9, 0.3)]
        acceptance.learn([a_round([(0.9,), (0.9,)], accepted, ("easy", "hard"))])
    survivals = survivals_of(acceptance, [(0.9,)] * 3, ("easy", "hard", "new"))[:, 0]
    assert survivals == pytest.approx([0.9, 0.3, 0.6], abs=0.12)


def test_where_all_groups_do_better_than_before_none_is_told_apart():
    """Rates follow what is accepted of all; a factor beside them would follow it twice."""
    acceptance, groups = learned(drafts({0.9: 0.3}, 500), memory=1e9), ("a", "b", "c")
    for _ in range(12):
        acceptance.learn([a_round([(0.9,) * K] * 3, [K] * 3, groups)])
    expected = survivals_of(acceptance, [(0.9,)])[0, 0]
    assert 0.3 < expected < 0.4
    told = survivals_of(acceptance, [(0.9,)] * 3, groups)[:, 0]
    assert told == pytest.approx([expected] * 3, abs=0.05)


def test_of_the_best_group_no_token_is_sure_and_of_the_worst_none_is_hopeless():
    acceptance, groups = learned(drafts({0.9: 0.7}, 500), memory=1e9), ("good", "bad")
    for _ in range(100):
        acceptance.learn([a_round([(0.9,) * K] * 2, [K, 0], groups)])
    good, bad = survivals_of(acceptance, [(0.9,) * K] * 2, groups)[:, 0]
    assert 0.9 < good < 1.0 and 0.0 < bad < 0.2


def test_new_weights_leave_little_of_what_was_counted():
    acceptance = learned(drafts({0.9: 0.2}, 2000), memory=1e9)
    acceptance.doubt()
    assert acceptance.num_known == pytest.approx(16.0)
    assert survivals_of(acceptance, [(0.9,)])[0, 0] == pytest.approx(0.25, abs=0.06)
    acceptance.learn([a_round([(0.9,)] * 32, [1] * 32)])
    assert survivals_of(acceptance, [(0.9,)])[0, 0] > 0.6


def test_groups_are_remembered_up_to_a_limit():
    acceptance = Acceptance(K, Prior(num_groups=10))
    for group in range(50):
        acceptance.learn([a_round([(0.9,)], [group % 2], (group,))])
    assert acceptance.overall > 0.0
    rates = survivals_of(acceptance, [(0.9,)] * 51, (*range(50), "new"))[:, 0]
    assert all(rates[:40] == rates[50])
    assert all(rates[40:50] != rates[50])


def test_before_drafting_drafts_are_foreseen_as_short_and_as_good_as_they_were():
    coins = np.random.default_rng(1)
    rounds = []
    for _ in range(2000):  # half of the drafts are empty, the others are accepted at 0.8
        draft = (0.9,) * (K if coins.random() < 0.5 else 0)
        rejected = [coins.random() >= 0.8 for _ in draft]
        rounds.append(a_round([draft], [rejected.index(True) if True in rejected else len(draft)]))
    rows, accepted = learned(rounds, memory=1e9).forecast(3)
    assert rows.shape == accepted.shape == (3, K)
    assert rows[0] == pytest.approx([0.5] * K, abs=0.04)
    assert accepted[2] == pytest.approx([0.5 * 0.8**d for d in range(1, K + 1)], abs=0.04)


def test_depths_that_were_not_asked_for_are_not_foreseen_as_empty():
    rounds = [a_round([(0.9,)], [1], limit=1)] * 500
    rows, _ = learned(rounds, memory=1e9).forecast(1)
    assert rows[0] == pytest.approx([1.0] * K, abs=0.02)


def test_rounds_that_are_counted_together_are_counted_like_one_by_one():
    rounds = drafts({0.99: 0.8, 0.5: 0.3}, 403)
    together, one_by_one = Acceptance(K, Prior(memory=1e9)), Acceptance(K, Prior(memory=1e9))
    for first in range(0, len(rounds), 4):
        together.learn(rounds[first : first + 4])
    for last_round in rounds:
        one_by_one.learn([last_round])
        assert 0.0 < one_by_one.overall < 1.0
    for acceptance in (together, one_by_one):
        acceptance.age(1.0)
    confidences = [(0.99, 0.5, 0.99, 0.5), (0.5,) * K]
    expected = survivals_of(one_by_one, confidences)
    assert survivals_of(together, confidences) == pytest.approx(expected, rel=1e-6)


def test_of_a_drafter_that_is_hardly_known_each_round_counts_at_once():
    acceptance = Acceptance(K)
    for _ in range(5):
        before = survivals_of(acceptance, [(0.9,)])[0, 0]
        acceptance.learn([a_round([(0.9, 0.9, 0.9)], [0], verified=[3])])
        assert survivals_of(acceptance, [(0.9,)])[0, 0] < before


def test_aging_brings_back_the_hope():
    acceptance = learned(drafts({0.99: 0.0}, 300), memory=1e9)
    low = acceptance.overall
    acceptance.age(0.01)
    assert low < 0.02 < 0.2 < acceptance.overall


def test_drafts_that_nobody_verified_are_learned_from_by_what_the_target_sampled():
    """A drafter that was wrong at first and is right now is found out without a verification."""
    acceptance = learned([a_round([(0.9, 0.9)], [0])] * 50)
    assert survivals_of(acceptance, [(0.9,)])[0, 0] < 0.1
    unverified = replace(a_round([(0.9, 0.9)], [0], verified=[0]), foreseen=(True,))
    for _ in range(500):
        acceptance.learn([unverified])
    assert survivals_of(acceptance, [(0.9,)])[0, 0] > 0.8
    behind = replace(a_round([(0.9, 0.9)], [1], verified=[1]), foreseen=(False,))
    assert survivals_of(learned([behind] * 500), [(0.9, 0.9)])[0, 1] < 0.05
    unknown = replace(behind, foreseen=(None,))
    assert survivals_of(learned([unknown] * 500), [(0.9, 0.9)])[0, 1] > 0.5


def test_drafts_that_are_verified_while_they_are_sure_are_foreseen_as_that():
    """Half of the tokens are sure, and right; of the others one in ten is."""
    acceptance = learned(drafts({0.99: 0.98, 0.5: 0.1}, 4000), memory=1e9)
    rows, survival = acceptance.forecast_chosen(2, (), 0.3)
    assert rows.shape == survival.shape == (2, K)
    for depth in range(K):
        assert rows[1, depth] == pytest.approx(0.5 ** (depth + 1), abs=0.05)
        assert survival[1, depth] == pytest.approx(0.49 ** (depth + 1), abs=0.05)
    rows, survival = acceptance.forecast_chosen(1, (), 0.0)
    assert rows[0] == pytest.approx(np.ones(K), abs=0.01)
    assert survival[0] == pytest.approx(0.54 ** np.arange(1, K + 1), abs=0.06)
    assert 0.5 < acceptance.sure_above(0.3) <= 0.99
    assert acceptance.sure_above(0.0) == 0.0


def test_tokens_that_never_come_are_not_foreseen_as_verified():
    rounds = [a_round([(0.99,)], [1]), a_round([()], [0])] * 200
    rows, _ = learned(rounds, memory=1e9).forecast_chosen(1, (), 0.3)
    assert rows[0, 0] == pytest.approx(0.5, abs=0.05)
    assert rows[0, 1] < 0.05
    unsure = [replace(each, unsure_below=1.0) for each in rounds]  # who drafts stopped there
    rows, _ = learned(unsure, memory=1e9).forecast_chosen(1, (), 0.3)
    assert rows[0, 1] == pytest.approx(rows[0, 0], abs=0.05)


def test_of_another_draft_the_same_confidences_are_the_better_ones():
    acceptance = learned(drafts({0.99: 0.9, 0.5: 0.2}, 4000), memory=1e9)
    acceptance.expect((0.75, 0.7))
    survivals = survivals_of(acceptance, [(0.99, 0.99), (0.5, 0.5)])
    first, second = survivals[:, 0], survivals[:, 1] / survivals[:, 0]
    assert first.mean() == pytest.approx(0.75, abs=0.06)
    assert second.mean() == pytest.approx(0.7, abs=0.06)
    assert first[0] > 0.9 and first[1] < 0.6
