"""The draft-length controller on simulated machines: gains, costs, and when it is off."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tests.speculative.draft_length.simulated import (
    DRAFTERS,
    MACHINES,
    Drafter,
    Machine,
    Run,
    compute_bound,
    few_cores,
    fixed_goodput,
    memory_bound,
    started,
)
from tinkercloud.speculative.draft_length.acceptance import Acceptance
from tinkercloud.speculative.draft_length.controller import (
    ControllerSettings,
    DraftLengthController,
)
from tinkercloud.speculative.draft_length.costs import ROWS, CostTable, MeasuredCosts
from tinkercloud.speculative.draft_length.draft_costs import DraftCosts
from tinkercloud.speculative.draft_length.planning import Estimates, PlannerSettings, urgency
from tinkercloud.speculative.draft_length.probing import ProbeSchedule, Probing
from tinkercloud.speculative.draft_length.rounds import Kind, Load, Reason, Round, Times

ALL_DRAFTERS = {**DRAFTERS, "seldom sure": Drafter((0.9,), hard=0.7, dull=0.1, empty=0.3)}
NUM_ROUNDS = 700
BATCHES = (1, 8, pytest.param(128, marks=pytest.mark.slow))
PAYS = 1.2


def loads(many: int) -> list[Load]:
    return [Load(100, group=i // 8, num_living=8) for i in range(many)]


def ran(run: Run, many: int, num_rounds: int = NUM_ROUNDS) -> Run:
    for _ in range(num_rounds):
        run.round(loads(many))
    return run


def plain(machine: str, many: int) -> float:
    return many / MACHINES[machine](many)


@pytest.mark.parametrize("many", BATCHES)
@pytest.mark.parametrize("drafter", ALL_DRAFTERS)
@pytest.mark.parametrize("machine", MACHINES)
def test_goodput_is_never_below_plain_and_near_the_best_fixed_length(machine, drafter, many):
    num_rounds = NUM_ROUNDS if many < 128 else NUM_ROUNDS // 3
    run = ran(started(MACHINES[machine], ALL_DRAFTERS[drafter], seed=5), many, num_rounds)
    goodput = run.outcome.goodput
    assert goodput >= 0.95 * plain(machine, many)
    best = max(
        fixed_goodput(MACHINES[machine], ALL_DRAFTERS[drafter], many, k) for k in range(1, 9)
    )
    if best >= PAYS * plain(machine, many):
        assert goodput >= 0.95 * best


def test_drafts_that_tell_good_from_bad_bring_more_than_any_fixed_length():
    drafter = ALL_DRAFTERS["seldom sure"]
    run = ran(started(memory_bound, drafter, seed=1), 8)
    assert run.outcome.goodput > 1.05 * max(
        fixed_goodput(memory_bound, drafter, 8, k) for k in range(1, 9)
    )


@pytest.mark.parametrize("many", [2, 4])
def test_drafts_that_cost_time_and_tell_good_from_bad_bring_more_than_any_fixed_length(many):
    drafter = Drafter((0.97,), hard=0.4, dull=0.05, round_ms=1.0, step_ms=0.6)
    run = ran(started(few_cores, drafter, seed=1), many)
    assert run.outcome.goodput > 1.05 * max(
        fixed_goodput(few_cores, drafter, many, k) for k in range(1, 9)
    )


# ---- the off switch


def late(run: Run) -> Counter[str]:
    return Counter(run.outcome.reasons[len(run.outcome.reasons) // 2 :])


def test_at_batch_128_of_a_compute_bound_machine_it_is_off():
    reasons: Counter[str] = Counter()
    for seed in (2, 3, 4):
        run = ran(started(compute_bound, Drafter((0.7,), step_ms=20.0), seed=seed), 128, 300)
        assert not run.controller.is_on
        assert sum(run.outcome.drafted[150:]) <= 2 * 16  # two probes at most
        reasons += late(run)
    assert reasons.most_common(1)[0][0] == Reason.TOO_MANY


def test_a_drafter_that_is_never_right_is_off():
    run = ran(started(memory_bound, Drafter((0.0,), step_ms=1.0), seed=2), 8)
    assert late(run).most_common(1)[0][0] == Reason.ACCEPTANCE
    assert not run.controller.is_on


def test_a_drafter_that_costs_more_than_it_brings_is_off():
    run = ran(started(memory_bound, Drafter((0.8,), round_ms=60.0), seed=2), 8)
    assert late(run).most_common(1)[0][0] == Reason.DRAFTER


def test_nothing_is_asked_for_after_a_stop():
    run = ran(started(memory_bound, DRAFTERS["history"]), 4, 20)
    assert run.controller.is_on
    run.controller.stop(Reason.ALARM)
    assert run.controller.limits(loads(4)) == [0] * 4 and run.controller.reason is Reason.ALARM
    assert not run.controller.is_on


def test_sessions_that_want_no_drafts_get_none():
    controller = quiet_controller()
    mixed = [Load(100), Load(100, speculates=False), Load(100)]
    limits = controller.limits(mixed)
    assert limits[0] and limits[2] and not limits[1]
    assert controller.limits([Load(100, speculates=False)]) == [0]
    assert controller.reason is Reason.UNWANTED


def test_a_draft_that_comes_empty_has_its_reason():
    controller = started(memory_bound, DRAFTERS["history"]).controller
    assert any(controller.limits(loads(2)))
    assert controller.choose([(), ()]) == [0, 0] and controller.reason is Reason.EMPTY


# ---- between on and off


@pytest.mark.parametrize("rate", (0.17, 0.21))
def test_it_does_not_flap_at_the_break_even(rate):
    run = started(memory_bound, Drafter((rate,), step_ms=1.0), seed=4)
    states = []
    for _ in range(800):
        run.round(loads(8))
        states.append(run.controller.is_on)
    assert sum(a != b for a, b in itertools.pairwise(states)) <= 4


def test_between_the_margins_it_stays_as_it_is():
    """A new drafter's eight tokens bring 1.9 for one: 0.035 over plain at 18.3 ms for 10."""
    off, on = quiet_controller(verify_ms=18.3), quiet_controller(verify_ms=17.0)
    off.limits(loads(1))
    on.limits(loads(1))
    assert on.is_on and not off.is_on
    retimed(on, 18.3).limits(loads(1))
    assert on.is_on
    retimed(on, 18.8).limits(loads(1))
    assert not on.is_on
    retimed(on, 18.3).limits(loads(1))
    assert not on.is_on


def retimed(controller: DraftLengthController, verify_ms: float) -> DraftLengthController:
    controller._estimates.costs = flat(verify_ms)
    controller._planner.discard_plan()
    return controller


def test_a_drafter_that_becomes_good_is_found_by_probing():
    drafter = Drafter((0.0,), step_ms=1.0)
    run = ran(started(memory_bound, drafter, seed=3), 8)
    assert not run.controller.is_on
    drafter.rates = (0.9,)
    ran(run, 8, 1600)
    assert run.controller.is_on


@pytest.mark.parametrize("num_wrong", [10, 40])
def test_drafts_that_cost_nothing_are_used_soon_though_they_were_wrong_at_first(num_wrong):
    """A text begins to repeat itself only later, within some hundred tokens of a sample."""
    num_rounds = []
    for seed in range(12):
        run = started(few_cores, Drafter((0.0,), token_ms=0.0), seed)
        for _ in range(num_wrong):
            run.round([Load(100)])
        run.drafter.rates = (0.95,)
        while run.outcome.drafted[-1] < 3 and len(run.outcome.drafted) < 400:
            run.round([Load(100)])
        num_rounds.append(len(run.outcome.drafted) - num_wrong)
    assert np.mean(num_rounds) < 30 and max(num_rounds) < 100, num_rounds


def test_drafts_of_many_that_cost_a_fiftieth_of_a_round_are_used_soon_after_new_weights():
    """Epochs of RL have some fifty rounds, and what they wrote is drafted well in the next one."""
    num_used = []
    for seed in range(12):
        run = ran(started(few_cores, Drafter((0.3,), token_ms=0.01), seed), 32, 45)
        run.drafter.rates = (0.97,)
        run.controller.renew()
        begin = len(run.outcome.drafted)
        ran(run, 32, 45)
        num_used.append(sum(n >= 32 for n in run.outcome.drafted[begin:]))
    assert sum(num >= 20 for num in num_used) >= 10 and np.mean(num_used) >= 28, num_used


def test_after_new_weights_it_is_tried_again_soon():
    drafter = Drafter((0.0,), step_ms=1.0)
    run = ran(started(memory_bound, drafter, seed=3), 8)
    drafter.rates = (0.9,)
    run.controller.renew()
    ran(run, 8, 150)
    assert run.controller.is_on


@pytest.mark.parametrize("many", (1, 4))
def test_a_better_draft_is_used_soon_though_a_slow_minute_taught_wrong_times(many):
    """While nothing was drafted no round could correct them."""
    drafter = Drafter((0.05,), step_ms=1.5)
    run = ran(started(few_cores, drafter, seed=2), many, 400)
    costs = run.controller._estimates.costs
    for _ in range(12):  # rounds that verify, twice as slow as measured, between plain ones
        for rows, factor in ((many, 1.0), (3 * many, 2.0)):
            costs.observe(rows, many, 0.0, factor * few_cores(rows))
    drafter.rates = (0.65,)
    run.controller.renew([0.65])
    run.controller.renew()  # a new version of the policy
    begin = len(run.outcome.drafted)
    ran(run, many, 120)
    assert sum(run.outcome.drafted[begin : begin + 20]) > 10 * many
    assert run.controller.is_on


def test_a_better_draft_is_used_soon_though_its_drafter_has_much_to_read_first():
    """What a head reads after a hundred rounds without drafts is not what its drafts cost."""
    drafter = Drafter((0.05,), step_ms=1.0, read_ms=0.5)
    run = ran(started(memory_bound, drafter, seed=3), 4, 600)
    assert not run.controller.is_on
    drafter.rates = (0.85,)
    run.controller.renew([0.85])
    ran(run, 4, 60)
    assert run.controller.is_on
    assert sum(run.outcome.drafted[-40:]) > 40 * 4


def test_a_better_draft_is_met_anew_though_drafts_were_dear_before():
    """As of a network that had to be read from memory first: no later round corrected that."""
    drafter = Drafter((0.05,), step_ms=8.0)
    run = ran(started(few_cores, drafter, seed=2), 4, 200)
    assert not run.controller.is_on
    assert run.controller._estimates.drafting.ms(4, 1) > 4.0
    drafter.rates, drafter.step_ms = (0.7,), 0.5
    run.controller.renew([0.3])  # less than it will be
    begin = len(run.outcome.kinds)
    ran(run, 4, 60)
    assert run.outcome.kinds[begin : begin + 4] == [Kind.WARM_UP] * 4
    assert run.controller._estimates.drafting.ms(4, 1) < 1.0
    assert run.controller.is_on


def test_rounds_in_which_it_is_not_asked_count_for_probes_and_bars():
    """Of eight rounds it decides one, as in an engine where nothing is drafted."""
    probes: list[int] = []
    for num_skipped in (0, 7):
        run = started(memory_bound, Drafter((0.0,), step_ms=1.0), seed=6)
        ran(run, 4, 40)
        for _ in range(3000 // (1 + num_skipped)):
            run.round(loads(4))
            for _ in range(num_skipped):
                run.controller.skipped(memory_bound(4), 4, usable=True)
        probes.append(run.outcome.kinds.count(Kind.PROBE))
    assert probes[1] >= probes[0] > 3
    controller = quiet_controller()
    controller._profit.barred_rounds = 2
    for is_barred in (True, False):
        controller.skipped(10.0, 4, usable=False)
        controller.limits(loads(4))
        assert controller._profit.is_barred is is_barred


def test_rounds_in_which_it_is_not_asked_tell_how_fast_the_machine_is():
    """One that became slower meanwhile must not look as if verifying took longer."""
    ratios = []
    for taught in (False, True):
        controller = DraftLengthController(Estimates(few_cores_table()))
        costs = controller._estimates.costs
        for slower in (1.0, 1.5):
            for _ in range(20):
                controller.skipped(slower * few_cores(4), 4, usable=taught or slower == 1.0)
            controller.limits(loads(4))
        costs.observe(12, 4, 100.0, 1.5 * few_cores(12))
        ratios.append(costs.verify_ms(np.array([12.0]), 4, 100.0)[0] / costs.plain_ms(4, 100.0))
        assert (costs.slowdown > 1.4) is taught
    expected = few_cores(12) / few_cores(4)
    assert ratios[1] == pytest.approx(expected, rel=0.01) and ratios[0] > 1.05 * expected


def few_cores_table() -> CostTable:
    ms = tuple(few_cores(rows) for rows in ROWS)
    return CostTable(MeasuredCosts(ROWS, ms, ms))


def test_drafts_of_many_are_shorter_and_together_about_what_a_forward_holds():
    settings = ControllerSettings(PlannerSettings(max_tokens=24, max_rows=256))
    for many, longest in ((1, 24), (8, 24), (16, 16), (32, 8), (64, 8)):
        controller = DraftLengthController(Estimates(few_cores_table()), settings)
        controller._estimates.drafting.num_rounds = len(settings.warm_up)
        assert controller.limits(loads(many)) == [longest] * many


def test_where_no_draft_could_pay_none_is_asked_for_though_it_costs_nothing():
    run = ran(started(compute_bound, Drafter((1.0,), token_ms=0.0), seed=1), 128, 20)
    assert not any(run.controller.limits(loads(128)))
    assert run.controller.reason is Reason.TOO_MANY
    assert any(run.controller.limits(loads(1)))


@pytest.mark.parametrize(("rate", "most"), [(0.98, 8), (0.5, 4)])
def test_the_more_drafts_gain_the_more_rounds_are_learned_from_together(rate, most):
    run = ran(started(few_cores, Drafter((rate,), token_ms=0.0), seed=1), 1, 300)
    learned = Counter[int]()
    acceptance = run.controller._estimates.acceptance
    learn = acceptance.learn

    def counted(rounds: list[Round]) -> None:
        learned[len(rounds)] += 1
        learn(rounds)

    acceptance.learn = counted
    ran(run, 1, 300)
    assert max(learned) == most


def test_a_drafter_that_becomes_bad_is_switched_off_soon():
    drafter = Drafter((0.9,), step_ms=2.0)
    run = ran(started(memory_bound, drafter, seed=3), 8, 300)
    assert run.controller.is_on
    drafter.rates = (0.0,)
    ran(run, 8, 100)
    assert not run.controller.is_on


def test_probes_are_few_and_fewer_as_they_fail():
    run = ran(started(memory_bound, Drafter((0.0,), step_ms=1.0), seed=6), 4, 3000)
    at = [i for i, kind in enumerate(run.outcome.kinds) if kind == Kind.PROBE]
    assert 3 <= len(at) <= 30
    gaps = np.diff(at)
    assert gaps[0] >= 100 and gaps[-1] >= 2 * gaps[0]
    assert max(run.outcome.drafted[i] for i in at) <= 2 * 4


@pytest.mark.parametrize("every", (1, 100))
def test_probing_loses_no_more_than_its_share_of_the_time(every):
    probing = Probing(ProbeSchedule(every=every, limit=every, budget=0.01))
    lost = total = 0.0
    for _ in range(20_000):
        if probing.due(loss_ms=30.0):
            probing.observe(well=False, loss_ms=30.0)
            lost, total = lost + 30.0, total + 30.0
        probing.advance(10.0)
        total += 10.0
    assert 0 < lost <= 0.0101 * total


@pytest.mark.parametrize(("step_ms", "least", "most"), [(1.0, 8, 10), (0.0, 2, 4)])
def test_while_on_a_plain_round_is_made_now_and_then(step_ms, least, most):
    """Less often where drafts cost nothing."""
    drafter = replace(DRAFTERS["history"], step_ms=step_ms)
    run = ran(started(memory_bound, drafter), 4)
    compared = run.outcome.kinds.count(Kind.COMPARISON)
    assert least <= compared <= most  # soon at first
    assert run.outcome.reasons.count(Reason.COMPARING) == compared


# ---- expectations that are wrong


def wrongly_timed(verify: float) -> DraftLengthController:
    plain_ms = tuple(few_cores(rows) for rows in ROWS)
    costs = MeasuredCosts(ROWS, plain_ms, tuple(verify * ms for ms in plain_ms))
    return DraftLengthController(Estimates(CostTable(costs)))


@pytest.mark.parametrize("many", (1, 8, 32))
def test_a_table_that_promises_too_much_is_found_out(many):
    """Verifying is measured at a third of its time."""
    run = Run(Machine(few_cores, 7), Drafter((0.3,)), wrongly_timed(0.34))
    ran(run, many, 1500)
    assert run.outcome.goodput >= 0.95 * many / few_cores(many)


def test_the_profit_tracker_alone_stops_what_falls_behind(monkeypatch):
    """A table that learns nothing goes on promising; what the rounds brought does not."""
    monkeypatch.setattr(CostTable, "observe", lambda *args: 1.0)
    plain_ms = tuple(few_cores(rows) for rows in ROWS)
    estimates = Estimates(CostTable(MeasuredCosts(ROWS, plain_ms, (few_cores(8),) * len(ROWS))))
    run = Run(Machine(few_cores, 7, wander=0.0), Drafter((0.5,)), DraftLengthController(estimates))
    ran(run, 8, 1500)
    assert run.outcome.reasons[:60].count(Reason.BEHIND) > 0
    assert run.outcome.goodput >= 0.95 * 8 / few_cores(8)


# ---- shares of the budget


def flat(verify_ms: float) -> CostTable:
    return CostTable(MeasuredCosts(ROWS, (10.0,) * len(ROWS), (verify_ms,) * len(ROWS)))


def quiet_controller(max_rows: int = 256, verify_ms: float = 10.5) -> DraftLengthController:
    estimates = Estimates(flat(verify_ms), DraftCosts(step_ms=0.01), Acceptance())
    return DraftLengthController(
        estimates, ControllerSettings(PlannerSettings(max_rows=max_rows, free=0.0), warm_up=())
    )


def test_a_new_drafter_is_met_in_a_few_small_rounds():
    run = ran(started(memory_bound, DRAFTERS["small model"]), 32, 5)
    assert run.outcome.kinds[:4] == [Kind.WARM_UP] * 4 != run.outcome.kinds[4:]
    assert run.outcome.drafted[:4] == [1, 16, 8, 8]


def test_a_new_drafter_that_takes_longer_than_a_plain_round_is_met_once():
    run = ran(started(memory_bound, Drafter((0.5,), round_ms=60.0)), 4, 5)
    assert run.outcome.kinds.count(Kind.WARM_UP) == 1


def test_a_new_drafter_is_met_where_there_is_little_room():
    estimates = Estimates(flat(10.5))
    controller = DraftLengthController(estimates, ControllerSettings(PlannerSettings(max_rows=5)))
    for _ in range(6):
        limits = controller.limits(loads(3))
        seen = controller.choose([(0.9,) * n for n in limits])
        assert sum(seen) <= 2
        confidences = tuple((0.9,) * n for n in limits)
        controller.observe(
            Round(tuple(limits), confidences, tuple(seen), tuple(seen), Times(0.01, 10))
        )
    assert controller.kind is Kind.SPECULATIVE
    assert sum(seen) == 2


def test_no_draft_is_longer_than_the_cap_and_no_forward_wider_than_its_rows():
    assert quiet_controller().limits(loads(2)) == [8, 8]
    controller = quiet_controller(max_rows=10)
    limits = controller.limits(loads(4))
    chosen = controller.choose([(0.9,) * n for n in limits])
    assert sum(chosen) <= 6
    assert quiet_controller(max_rows=4).limits(loads(4)) == [0] * 4


def test_the_last_of_a_group_and_the_longest_are_served_first():
    waiting = [
        Load(100, group="a", num_living=3, remaining=10),
        Load(100, group="a", num_living=3, remaining=40),
        Load(100, group="b", num_living=1, remaining=10),
    ]
    weights = urgency(waiting, 1.0)
    assert weights is not None and weights.tolist() == [1.25, 2.0, 2.0]
    assert urgency(loads(5), 1.0) is None
    controller = quiet_controller(max_rows=7)
    controller.limits(waiting)
    controller._limits = (8, 8, 8)
    chosen = controller.choose([(0.9,) * 8] * 3)
    assert chosen[0] <= min(chosen[1:]) and sum(chosen) == 4


def test_the_same_rounds_give_the_same_answers():
    first, second = (
        ran(started(few_cores, ALL_DRAFTERS["seldom sure"], seed=9), 8, 300) for _ in range(2)
    )
    assert first.outcome.drafted == second.outcome.drafted
    assert first.outcome.kinds == second.outcome.kinds


def test_a_round_shared_with_other_work_teaches_no_times():
    controller, rows = quiet_controller(), np.array(ROWS, np.float64)
    limits = controller.limits(loads(1))
    controller.choose([(0.9,) * limits[0]])
    costs = controller._estimates.costs
    before = costs.slowdown, costs.verify_ms(rows, 1, 0.0).tolist()
    controller.observe(
        Round(
            tuple(limits),
            ((0.9,) * limits[0],),
            tuple(limits),
            (0,),
            Times(9.0, 500.0, usable=False),
        )
    )
    assert (costs.slowdown, costs.verify_ms(rows, 1, 0.0).tolist()) == before
