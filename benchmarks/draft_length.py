"""What each part of the draft-length controller brings: it is left out, on simulated machines.

Every world is a machine, a drafter and what becomes of them. Each is run with several seeds, once
with all parts and once without each, and the tokens per millisecond are compared seed by seed. A
part that brings nothing anywhere has no place in the controller.
"""

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, sqrt

import numpy as np

from benchmarks.lib.arguments import BenchmarkParser
from benchmarks.lib.machine import versions
from benchmarks.lib.report import Cell, Report, Target, about
from tests.speculative.draft_length.simulated import (
    Drafter,
    Machine,
    Run,
    compute_bound,
    few_cores,
    fixed_goodput,
    memory_bound,
)
from tinkercloud.speculative.draft_length.acceptance import Acceptance
from tinkercloud.speculative.draft_length.controller import (
    ControllerSettings,
    DraftLengthController,
)
from tinkercloud.speculative.draft_length.costs import ROWS, CostTable, MeasuredCosts
from tinkercloud.speculative.draft_length.planning import Estimates, PlannerSettings
from tinkercloud.speculative.draft_length.probing import ProbeSchedule
from tinkercloud.speculative.draft_length.profit_tracker import ProfitTracker
from tinkercloud.speculative.draft_length.rounds import Load, Round

HURTS, LEAST, BEST = 0.02, 0.95, 0.98
COLUMNS = (
    *("left out", "mean of all worlds", "dearest in", "there", "+-", "worlds that lose 2 %"),
    "worlds that gain 2 %",
)
NEVER = 10**9
AVX2_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
AVX2_MS = (20.0, 22.6, 27.6, 30.2, 36.5, 40.1, 55.1, 64.3, 95.9, 119, 185, 244, 329, 399)


def avx2(rows: int) -> float:
    """SmolLM2-135M in float32 on two cores with AVX2, as `round_costs` measured them."""
    return float(np.interp(rows, AVX2_ROWS, AVX2_MS))


# ---- what is left out


class OneBucket(Acceptance):
    """Without the drafter's confidence."""

    def survivals(
        self, confidences: Sequence[Sequence[float]], groups: Sequence[Hashable] = ()
    ) -> list[list[float]]:
        return super().survivals(_sure(confidences), groups)

    def learn(self, last_round: Round) -> None:
        super().learn(replace(last_round, confidences=_sure(last_round.confidences)))


def _sure(confidences: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple((1.0,) * len(draft) for draft in confidences)


class NoGroups(Acceptance):
    def _factors(self, num_sequences: int, groups: Sequence[Hashable]) -> list[float]:
        return [1.0] * num_sequences


class FixedShape(CostTable):
    """Learns how slow the machine is, not how its times rise with rows."""

    def _compare(self, before: tuple[int, float, float], now: tuple[int, float, float]) -> None:
        pass


class FixedCosts(CostTable):
    def observe(self, rows: int, sequences: int, context: float, ms: float) -> float:
        return 1.0


@dataclass(frozen=True)
class Part:
    """How a controller without it is made."""

    settings: ControllerSettings = field(default_factory=ControllerSettings)
    acceptance: type[Acceptance] = Acceptance
    costs: type[CostTable] = CostTable
    change: Callable[[DraftLengthController], None] = lambda controller: None

    def controller(self, measured: MeasuredCosts) -> DraftLengthController:
        estimates = Estimates(self.costs(measured), acceptance=self.acceptance())
        made = DraftLengthController(estimates, self.settings)
        self.change(made)
        return made


def without_comparisons(controller: DraftLengthController) -> None:
    controller._next_comparison = NEVER


class BlindTracker(ProfitTracker):
    def add(self, worth_ms: float, spent_ms: float, num_sequences: int) -> None:
        pass


def without_profit(controller: DraftLengthController) -> None:
    controller._profit = BlindTracker()


def without_doubt(controller: DraftLengthController) -> None:
    """A new draft is expected to be better, and its times are those of the old one."""
    estimates = controller._estimates
    estimates.costs.doubt = lambda: None
    estimates.drafting.forget = lambda: None


def without_expectation(controller: DraftLengthController) -> None:
    renew = controller.renew
    controller.renew = lambda expected=(): renew()


ALL = "nothing"
SETTINGS = ControllerSettings()
PARTS: Mapping[str, Part] = {
    ALL: Part(),
    "plain rounds while on": Part(change=without_comparisons),
    "hysteresis": Part(replace(SETTINGS, switch_off=SETTINGS.planner.worthwhile)),
    "warm-up": Part(replace(SETTINGS, warm_up=())),
    "probes": Part(replace(SETTINGS, probe=ProbeSchedule(NEVER, NEVER, NEVER))),
    "profit tracker": Part(change=without_profit),
    "confidences": Part(acceptance=OneBucket),
    "groups' factors": Part(acceptance=NoGroups),
    "shape of costs, learned": Part(costs=FixedShape),
    "slowdown and shape": Part(costs=FixedCosts),
    "urgency": Part(replace(SETTINGS, planner=PlannerSettings(urgency=0.0))),
    "what a new draft is expected to bring": Part(change=without_expectation),
    "costs met anew with a new draft": Part(change=without_doubt),
}


# ---- worlds


@dataclass(frozen=True)
class World:
    """ms: of a round by rows, at the start; drafter: at the start. later: what a third of the
    rounds in becomes of the run. wrong: times of verifying as measured are so many times the real
    ones, by rows. by_group: whether drafts are dull for all samples of every second group, with
    nothing in the confidences to tell. finite: samples end, after so many tokens on average."""

    ms: Callable[[int], float]
    drafter: Drafter
    many: int
    later: Callable[[Run], None] | None = None
    wrong: Callable[[int], float] | None = None
    by_group: bool = False
    finite: int = 0


class Grouped(Run):
    def round(self, loads: list[Load]) -> list[int]:
        self.dull_loads = [bool(int(str(load.group)) % 2) for load in loads]
        return super().round(loads)

    def is_hard(self, num_loads: int) -> np.ndarray:
        return np.array(self.dull_loads)

    @staticmethod
    def confidence(*, hard: bool) -> float:
        return 0.9


def renewed(rates: tuple[float, ...], *, expected: bool = True) -> Callable[[Run], None]:
    """Another draft, which the gate has judged, or another policy."""

    def change(run: Run) -> None:
        run.drafter.rates = rates
        run.controller.renew(rates if expected else ())

    return change


def unnoticed(rates: tuple[float, ...]) -> Callable[[Run], None]:
    def change(run: Run) -> None:
        run.drafter.rates = rates

    return change


def slowed(run: Run) -> None:
    """Another process takes a core: what was bound by memory is bound by arithmetic."""
    run.machine.ms = compute_bound


def shown(machine: Callable[[int], float]) -> str:
    return machine.__name__.replace("_", " ")


def dent(rows: int) -> float:
    """Lengths between once measured too slow."""
    return 2.5 if 6 <= rows <= 12 else 1.0


HISTORY, FAIR = Drafter((0.9, 0.88, 0.85)), Drafter((0.6, 0.55, 0.5))
NEVER_RIGHT, SMALL = Drafter((0.0,)), Drafter((0.8,), step_ms=3.0)
HEAD = Drafter((0.75, 0.65, 0.55), step_ms=2.5, round_ms=1.0)
SURE = Drafter((0.9,), hard=0.7, dull=0.1, empty=0.3)
POOR_HEAD = replace(HEAD, rates=(0.1,))
STEADY = {
    "history": HISTORY, "fair": FAIR, "head": HEAD, "seldom sure": SURE, "never right": NEVER_RIGHT
}  # fmt: skip

WORLDS: Mapping[str, World] = {
    **{
        f"{name}, {shown(machine)}, {many} at once": World(machine, drafter, many)
        for machine, manys, drafters in (
            (avx2, (1, 4, 8), ("history", "head", "seldom sure")),
            (avx2, (8,), ("never right",)),
            (memory_bound, (4, 32), ("fair",)),
        )
        for name, drafter in ((name, STEADY[name]) for name in drafters)
        for many in manys
    },
    "verifying is slower than measured": World(few_cores, FAIR, 8, wrong=lambda rows: 0.34),
    "verifying is faster than measured": World(avx2, HEAD, 1, wrong=lambda rows: 2.5),
    "some lengths were measured too slow": World(avx2, HEAD, 1, wrong=dent),
    "some lengths too slow, four at once": World(memory_bound, SMALL, 4, wrong=dent),
    "a core is taken": World(memory_bound, HISTORY, 8, later=slowed),
    "a head learns, and is judged": World(avx2, POOR_HEAD, 4, later=renewed(HEAD.rates)),
    "a head is slow at first, then learns": World(
        avx2, replace(POOR_HEAD, step_ms=9.0), 1,
        later=lambda run: (setattr(run.drafter, "step_ms", 2.5), renewed(HEAD.rates)(run)),
    ),
    "a policy moves away": World(avx2, HEAD, 4, later=renewed((0.15,), expected=False)),
    "a policy moves away unnoticed": World(avx2, HEAD, 4, later=unnoticed((0.15,))),
    "drafts become good unnoticed": World(avx2, POOR_HEAD, 4, later=unnoticed(HEAD.rates)),
    "history becomes good unnoticed": World(avx2, NEVER_RIGHT, 4, later=unnoticed(HISTORY.rates)),
    "every second group has dull drafts": World(
        avx2, replace(HISTORY, dull=0.1), 8, by_group=True
    ),
    "every second group, memory bound": World(
        memory_bound, replace(SMALL, dull=0.1), 32, by_group=True
    ),
    "groups that end": World(avx2, FAIR, 8, finite=60),
    "groups that end, memory bound": World(memory_bound, FAIR, 32, finite=60),
}  # fmt: skip


def goodput(world: World, part: Part, seed: int, num_rounds: int) -> float:
    machine = Machine(world.ms, seed)
    measured = machine.measured()
    if world.wrong is not None:
        verify = tuple(
            ms * world.wrong(rows) for rows, ms in zip(ROWS, measured.verify_ms, strict=True)
        )
        measured = replace(measured, verify_ms=verify)
    kind = Grouped if world.by_group else Run
    run = kind(machine, replace(world.drafter), part.controller(measured))
    if world.finite:
        return finite_goodput(run, world, seed)
    for number in range(num_rounds):
        if world.later is not None and number == num_rounds // 3:
            world.later(run)
        run.round([Load(100, group=i // 4, num_living=4) for i in range(world.many)])
    return run.outcome.goodput


def finite_goodput(run: Run, world: World, seed: int) -> float:
    """Of batches until their last sample has ended: the next step waits for it."""
    coins, num_tokens = np.random.default_rng(seed), 0
    for _ in range(6):
        left = coins.geometric(1 / world.finite, world.many).tolist()
        num_tokens += sum(left)
        while any(n > 0 for n in left):
            living = [i for i, n in enumerate(left) if n > 0]
            groups = [i // 4 for i in living]
            loads = [Load(100, group, 1.0, groups.count(group)) for group in groups]
            for i, num in zip(living, run.round(loads), strict=True):
                left[i] -= 1 + num
    return num_tokens / run.outcome.quiet_ms


# ---- all of them


def measured_world(name: str, num_seeds: int, num_rounds: int) -> dict[str, list[float]]:
    return {
        part: [goodput(WORLDS[name], PARTS[part], seed, num_rounds) for seed in range(num_seeds)]
        for part in PARTS
    }


def ratios(found: Mapping[str, Mapping[str, list[float]]], part: str) -> dict[str, np.ndarray]:
    """By world, of every seed: without the part as a multiple of with all."""
    return {
        name: np.array(by_part[part]) / np.array(by_part[ALL]) for name, by_part in found.items()
    }


def row(found: Mapping[str, Mapping[str, list[float]]], part: str) -> tuple[Cell, ...]:
    by_world = ratios(found, part)
    means = {name: float(values.mean()) for name, values in by_world.items()}
    worst = min(means, key=lambda name: means[name])
    values = by_world[worst]
    error = 2 * float(values.std(ddof=1)) / sqrt(len(values))
    return (
        part, round(float(np.mean(list(means.values()))), 3), worst, round(means[worst], 2),
        round(error, 2), sum(mean <= 1 - HURTS for mean in means.values()),
        sum(mean >= 1 + HURTS for mean in means.values()),
    )  # fmt: skip


def targets(found: Mapping[str, Mapping[str, list[float]]]) -> list[Target]:
    """Of all parts together, in worlds that stay as they are."""
    steady = {n: w for n, w in WORLDS.items() if n in found and is_steady(w)}
    plain = min(
        (float(np.mean(found[n][ALL]) * w.ms(w.many) / w.many), n) for n, w in steady.items()
    )
    best = inf, ""
    for name, world in steady.items():
        fixed = max(fixed_goodput(world.ms, world.drafter, world.many, k) for k in range(1, 9))
        fixed = max(fixed, world.many / world.ms(world.many))
        best = min(best, (float(np.mean(found[name][ALL]) / fixed), name))
    return [
        Target.at_least(f"least of plain, in a steady world ({plain[1]})", plain[0], LEAST),
        Target.at_least(f"least of the best fixed length ({best[1]})", best[0], BEST),
    ]


def is_steady(world: World) -> bool:
    return world.later is None and not world.by_group and not world.finite


def main() -> None:
    parser = BenchmarkParser("draft_length", __doc__, quick="two seeds, 200 rounds")
    options = parser.parse_args()
    num_seeds, num_rounds = (2, 200) if options.quick else (3, 300)
    found: dict[str, dict[str, list[float]]] = {}
    measure = partial(measured_world, num_seeds=num_seeds, num_rounds=num_rounds)
    with ProcessPoolExecutor() as pool:
        for name, by_part in zip(WORLDS, pool.map(measure, WORLDS), strict=True):
            found[name] = by_part
            means = {part: round(float(ratios(found, part)[name].mean()), 3) for part in PARTS}
            print(name, means, file=sys.stderr, flush=True)
    report = Report(
        title="Parts of the draft-length controller",
        about=about(ABOUT.format(worlds=len(WORLDS), seeds=num_seeds, rounds=num_rounds)),
        command=parser.command(options),
        columns=COLUMNS,
        rows=[row(found, part) for part in PARTS if part != ALL],
        versions=versions("tinkercloud", "numpy"),
        targets=targets(found),
    )
    report.publish(options.json)


ABOUT = """\
The controller without one of its parts, as a multiple of its tokens per millisecond with all of
them: {worlds} simulated worlds, {seeds} seeds each, {rounds} rounds, two thirds of them after what
becomes of the world. Machines are bound by memory, by arithmetic, or have the times that were
measured on two cores with AVX2; their pace strays as that of a shared machine. *+-*: twice the
standard error over the seeds.
"""

if __name__ == "__main__":
    main()
