"""The calibration alarm against rules right and wrong, and what telemetry counts."""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tinkercloud.speculative import verify
from tinkercloud.speculative.draft_length.acceptance import Acceptance
from tinkercloud.speculative.draft_length.controller import DraftLengthController
from tinkercloud.speculative.draft_length.costs import ROWS, CostTable, MeasuredCosts
from tinkercloud.speculative.draft_length.planning import Estimates
from tinkercloud.speculative.draft_length.rounds import Kind, Load, Reason, Round, Times
from tinkercloud.speculative.observability.calibration import ALARM, LEAST_TOKENS, Calibration
from tinkercloud.speculative.observability.telemetry import RoundReport, Telemetry

V = 20
TOKENS = 2000

Coins = np.random.Generator
Judged = tuple[bool, float]
"""Whether a drafted token is accepted, and the chance that the audit gets."""


def a_distribution(coins: Coins) -> verify.Distribution:
    return coins.dirichlet(np.full(V, 0.3))


def gumbel(coins: Coins) -> np.ndarray:
    return -np.log(-np.log(coins.random(V)))


def drawn(p: verify.Distribution, noise: np.ndarray) -> int:
    return int(np.argmax(np.log(np.maximum(p, 1e-300)) + noise))


def likely(p: verify.Distribution, coins: Coins) -> int:
    """What a drafter proposes that does not know the noise: often the likeliest."""
    return int(np.argmax(p)) if coins.random() < 0.5 else int(coins.choice(V, p=p))


def matching(coins: Coins) -> Judged:
    p = a_distribution(coins)
    token = likely(p, coins)
    return drawn(p, gumbel(coins)) == token, p[token]


def greedy(coins: Coins) -> Judged:
    p = a_distribution(coins)
    token = int(np.argmax(p)) if coins.random() < 0.5 else int(coins.integers(V))
    accepted = token == np.argmax(p)
    return accepted, float(accepted)


def coupled(coins: Coins) -> Judged:
    """Target and drafter draw with the same noise, and the audit knows it."""
    p, q = a_distribution(coins), a_distribution(coins)
    p = 0.5 * p + 0.5 * q
    noise = gumbel(coins)
    token = drawn(q, noise)
    return drawn(p, noise) == token, verify.coupled_chance(p, q, token)


def selected(coins: Coins, of_token: bool) -> Judged:
    """A draft that is less sure than the target, verified where it is sure of its token; the chance
    is that of the drafted token, or the mean over all that it might have drafted."""
    token, q = 0, np.zeros(V)
    while q[token] < 0.1:
        p, noise = a_distribution(coins), gumbel(coins)
        q = p**0.7 / (p**0.7).sum()
        token = drawn(q, noise)
    chances = np.array([verify.coupled_chance(p, q, x) for x in range(V)])
    return drawn(p, noise) == token, float(chances[token] if of_token else q @ chances)


def coupled_selected(coins: Coins) -> Judged:
    return selected(coins, of_token=True)


def coupled_selected_by_the_mean(coins: Coins) -> Judged:
    return selected(coins, of_token=False)


def coupled_with_another_distribution(coins: Coins) -> Judged:
    """The drafter reports the distribution of the position before."""
    before, p, q = a_distribution(coins), a_distribution(coins), a_distribution(coins)
    p = 0.5 * p + 0.5 * q
    noise = gumbel(coins)
    token = drawn(q, noise)
    return drawn(p, noise) == token, verify.coupled_chance(p, before, token)


def coupled_by_other_noise(coins: Coins) -> Judged:
    p, q = a_distribution(coins), a_distribution(coins)
    p = 0.5 * p + 0.5 * q
    token = drawn(q, gumbel(coins))
    return drawn(p, gumbel(coins)) == token, verify.coupled_chance(p, q, token)


def accepts_too_much(coins: Coins) -> Judged:
    p = a_distribution(coins)
    token = likely(p, coins)
    return coins.random() < min(1.0, 1.3 * p[token]), p[token]


def accepts_too_little(coins: Coins) -> Judged:
    p = a_distribution(coins)
    token = likely(p, coins)
    return coins.random() < 0.7 * p[token], p[token]


def seed_used_twice(coins: Coins) -> Judged:
    """The drafter has text that was written with the noise of this sample."""
    p = a_distribution(coins)
    noise = gumbel(coins)
    q = 0.8 * p + 0.2 * a_distribution(coins)
    token = drawn(q, noise)
    return drawn(p, noise) == token, p[token]


def off_by_one(coins: Coins) -> Judged:
    """The token is judged by the distribution of the position before."""
    before, p = a_distribution(coins), a_distribution(coins)
    token = likely(p, coins)
    return drawn(before, gumbel(coins)) == token, p[token]


RIGHT = (matching, greedy, coupled, coupled_selected)
WRONG = (
    accepts_too_much,
    accepts_too_little,
    seed_used_twice,
    off_by_one,
    coupled_selected_by_the_mean,
    coupled_by_other_noise,
    coupled_with_another_distribution,
)


def window(rule: Callable[[Coins], Judged], seed: int, tokens: int = TOKENS) -> Calibration:
    coins = np.random.default_rng(seed)
    calibration = Calibration()
    for _ in range(tokens):
        calibration.add(*rule(coins))
    return calibration


@pytest.mark.parametrize("rule", RIGHT)
def test_right_rules_stay_within_four_deviations(rule):
    scores = [window(rule, seed, 500).z for seed in range(20)]
    assert max(map(abs, scores)) < 4
    if rule is not greedy:
        assert 0.5 < np.std(scores) < 1.6  # and vary as a standard normal does


@pytest.mark.parametrize("rule", WRONG)
def test_wrong_rules_raise_the_alarm(rule):
    assert all(window(rule, seed).alarms for seed in range(3))


def test_greedy_drafts_accepted_against_the_distribution_raise_the_alarm():
    calibration = window(greedy, 0, 500)
    calibration.add(True, 0.0)
    assert not calibration.alarms
    calibration.add(True, 0.0)
    assert calibration.alarms


def test_few_tokens_raise_no_alarm():
    calibration = Calibration()
    for _ in range(LEAST_TOKENS - 1):
        calibration.add(True, 0.1)
    assert calibration.z > ALARM and not calibration.alarms
    calibration.add(True, 0.1)
    assert calibration.alarms


def test_what_is_long_ago_leaves_the_window():
    calibration = Calibration()
    for _ in range(1000):
        calibration.add(True, 0.5)
    for i in range(6000):
        calibration.add(i % 2 == 0, 0.5)
    assert abs(calibration.z) < 1 and calibration.num_tokens <= 64 * 64


# ---- what is counted


def a_round(verified: tuple[int, ...], accepted: tuple[int, ...], ms: float = 10.0) -> Round:
    confidences = tuple((0.9,) * 3 for _ in verified)
    limits = (4,) * len(verified)
    return Round(limits, confidences, verified, accepted, Times(2.0, ms, 1.0))


def report(last_round: Round, kind: Kind = Kind.SPECULATIVE, **more) -> RoundReport:
    return RoundReport("suffix", kind, more.pop("reason", Reason.NONE), last_round, **more)


def test_depths_rows_times_and_lengths_are_counted():
    telemetry = Telemetry()
    telemetry.record(report(a_round((3, 2, 0), (1, 2, 0)), version_lag=2))
    snapshot = telemetry.snapshot()
    depths = snapshot["drafters"]["suffix"]["depths"]
    assert [d["proposed"] for d in depths] == [3, 3, 3]
    assert [d["verified"] for d in depths] == [2, 2, 1]
    assert [d["accepted"] for d in depths] == [2, 1, 0]
    assert snapshot["drafted"] == {"0": 1, "2": 1, "3": 1}
    assert snapshot["tokens"] == 6 and snapshot["tokens_per_forward"] == 6
    assert snapshot["tokens_per_sequence_forward"] == 2
    assert snapshot["rows"] == {"used": 6, "wasted": 2}
    assert snapshot["ms"] == {"draft": 2.0, "verify": 10.0, "host": 1.0}
    assert snapshot["drafters"]["suffix"]["version_lag"] == 2


def test_expected_is_compared_with_what_was_accepted_of_the_same_tokens():
    telemetry = Telemetry()
    chances = ((0.5, 0.25, 0.9), (float("nan"),))  # the third token was never judged
    telemetry.record(report(a_round((3, 1), (1, 1)), chances=chances))
    first, second, third = telemetry.snapshot()["drafters"]["suffix"]["depths"]
    assert (first["audited"], first["expected"], first["stood"]) == (1, 0.5, 1)
    assert (second["audited"], second["expected"], second["stood"]) == (1, 0.25, 0)
    assert third["audited"] == 0


def test_what_is_drafted_after_a_samples_end_is_not_judged():
    """Two drafted tokens are accepted and the second ends the sample: none is added or rejected."""
    telemetry = Telemetry()
    last_round = replace(a_round((3, 3), (2, 2)), ended=(True, False))
    telemetry.record(report(last_round, chances=((0.9,) * 3, (0.9,) * 3)))
    assert last_round.num_emitted == 5 and last_round.num_judged == (2, 3)
    snapshot = telemetry.snapshot()
    depths = snapshot["drafters"]["suffix"]["depths"]
    assert [(d["audited"], d["stood"]) for d in depths] == [(2, 2), (2, 2), (1, 0)]
    assert snapshot["tokens"] == 5 and snapshot["rows"] == {"used": 5, "wasted": 3}


def test_running_acceptance_follows_a_change():
    telemetry = Telemetry()
    for accepted in (3, 0):
        for _ in range(1500):
            telemetry.record(report(a_round((3,), (accepted,))))
        acceptance = telemetry.snapshot()["drafters"]["suffix"]["acceptance"]
        assert acceptance == pytest.approx(1.0 if accepted else 0.0, abs=0.06)


def test_goodput_compares_speculative_and_plain_rounds_of_like_loads():
    telemetry = Telemetry()
    for _ in range(50):
        telemetry.record(report(a_round((3, 3), (3, 3), ms=17.0)))  # 8 tokens in 20 ms
        telemetry.record(
            report(Round((0, 0), ((), ()), (0, 0), (0, 0), Times(0.0, 10.0)), Kind.COMPARISON)
        )
        telemetry.record(report(Round((0,), ((),), (0,), (0,), Times(0.0, 1.0)), Kind.PLAIN))
    snapshot = telemetry.snapshot()["goodput"]
    assert snapshot["2-3"]["speculative_per_s"] == pytest.approx(400)
    assert snapshot["2-3"]["plain_per_s"] == pytest.approx(200)
    assert snapshot["2-3"]["speedup"] == pytest.approx(2.0)
    assert snapshot["1-1"]["speedup"] is None


def test_reasons_and_kinds_of_rounds_are_counted():
    telemetry = Telemetry()
    nothing = Round((0,), ((),), (0,), (0,), Times(0.0, 10.0))
    telemetry.record(report(nothing, Kind.PLAIN, reason=Reason.TOO_MANY))
    telemetry.record(report(a_round((1,), (1,)), Kind.PROBE))
    snapshot = telemetry.snapshot()
    assert snapshot["off"] == {"too many sequences": 1}
    assert snapshot["rounds"]["plain"] == snapshot["rounds"]["probe"] == 1


def test_an_alarm_stays_and_turns_the_drafter_off():
    flat = MeasuredCosts(ROWS, (10.0,) * len(ROWS), (10.5,) * len(ROWS))
    controller = DraftLengthController(Estimates(CostTable(flat), acceptance=Acceptance()))
    telemetry = Telemetry()
    alarmed = []
    for _ in range(300):
        telemetry.record(report(a_round((2,), (2,)), chances=((0.3, 0.3),)))
        alarmed.append(telemetry.is_alarmed("suffix"))
        if alarmed[-1]:
            controller.stop(Reason.ALARM)
    assert not alarmed[0] and alarmed[-1] and alarmed == sorted(alarmed)
    assert telemetry.snapshot()["drafters"]["suffix"]["alarmed"]
    assert controller.limits([Load(100)]) == [0] and controller.reason is Reason.ALARM


# ---- how it is shown


def busy() -> Telemetry:
    telemetry = Telemetry()
    telemetry.record(report(a_round((3, 0), (1, 0)), chances=((0.5, 0.2), ())))
    telemetry.record(
        report(a_round((0, 0), (0, 0)), Kind.COMPARISON, reason=Reason.COMPARING, version_lag=1)
    )
    return telemetry


def test_the_snapshot_is_json():
    assert json.loads(json.dumps(busy().snapshot(), allow_nan=False)) == busy().snapshot()
    json.dumps(Telemetry().snapshot(), allow_nan=False)


def test_prometheus_lines_are_well_formed_and_say_what_the_snapshot_says():
    lines = busy().lines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    prefix = "tinkercloud_speculation_"
    assert float(values[prefix + 'tokens_accepted_total{drafter="suffix",depth="1"}']) == 1
    assert float(values[prefix + 'tokens_expected_total{drafter="suffix",depth="2"}']) == 0.2
    assert float(values[prefix + 'off_rounds_total{reason="comparing with plain"}']) == 1
    assert float(values[prefix + 'version_lag{drafter="suffix"}']) == 1
    assert float(values[prefix + "tokens_total"]) == 5
    assert float(values[prefix + 'seconds_total{part="draft"}']) == 0.004
    types = [line.split() for line in lines if line.startswith("# TYPE")]
    names = [name for _, _, name, _ in types]
    assert len(names) == len(set(names)) and {kind for *_, kind in types} == {"counter", "gauge"}
    assert all(name.endswith("_total") == (kind == "counter") for _, _, name, kind in types)
    assert len(values) == sum(not line.startswith("#") for line in lines)


def test_labels_are_escaped():
    telemetry = Telemetry()
    last_round = a_round((1,), (1,))
    telemetry.record(RoundReport('model:"a\\b"\n', Kind.SPECULATIVE, Reason.NONE, last_round))
    assert any('drafter="model:\\"a\\\\b\\"\\n"' in line for line in telemetry.lines())
