"""A machine and a drafter that exist in numbers only, with times as noisy as a shared machine's."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tinkercloud.speculative.draft_length.controller import DraftLengthController
from tinkercloud.speculative.draft_length.costs import CostTable, MeasuredCosts, measure_costs
from tinkercloud.speculative.draft_length.planning import Estimates
from tinkercloud.speculative.draft_length.rounds import Load, Round, Times


def memory_bound(rows: int) -> float:
    """A GPU at small batches: weights are read whatever the rows, until 128."""
    return 10.0 * (1.0 + 0.01 * rows + max(0.0, rows / 128 - 1.0))


def few_cores(rows: int) -> float:
    """Two cores, as v_k = 1 + 0.12 k at small batches, in proportion to rows at large ones."""
    return 30.0 * (0.88 + 0.12 * rows)


def compute_bound(rows: int) -> float:
    return 1.0 + 4.0 * rows


MACHINES: dict[str, Callable[[int], float]] = {
    "memory bound": memory_bound,
    "few cores": few_cores,
    "compute bound": compute_bound,
}


@dataclass
class Drafter:
    """Token d of a draft is accepted with rates[d] (the last for all deeper). A share `hard` of the
    drafts have rates[d] * dull instead, and confidences say which, on a wrong scale. empty: the
    share of times that nothing is proposed. read_ms: for the tokens of each round that it was not
    asked in, to be made up for when it next is."""

    rates: tuple[float, ...]
    hard: float = 0.0
    dull: float = 0.3
    empty: float = 0.0
    round_ms: float = 0.0
    step_ms: float = 0.0
    token_ms: float = 0.001
    read_ms: float = 0.0

    def rate(self, depth: int) -> float:
        return self.rates[min(depth, len(self.rates) - 1)]

    def ms(self, limits: list[int]) -> float:
        if not any(limits):
            return 0.0
        return self.round_ms + self.step_ms * max(limits) + self.token_ms * sum(limits)


DRAFTERS = {
    "history": Drafter((0.9, 0.88, 0.85)),
    "fair": Drafter((0.6, 0.55, 0.5)),
    "never right": Drafter((0.0,)),
    "small model": Drafter((0.8,), step_ms=3.0),
    "slow model": Drafter((0.5,), round_ms=20.0, step_ms=10.0),
}


@dataclass
class Machine:
    """wander: how far, in the logarithm, the pace strays within minutes; jitter: each round."""

    ms: Callable[[int], float]
    seed: int = 0
    wander: float = 0.35
    jitter: float = 0.08
    _pace: float = 0.0
    coins: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.coins = np.random.default_rng(self.seed)

    def noise(self) -> float:
        self._pace = 0.995 * self._pace + 0.1 * self.wander * self.coins.standard_normal()
        spike = 2.0 if self.coins.random() < 0.01 else 1.0
        return spike * float(np.exp(self._pace + self.jitter * self.coins.standard_normal()))

    def measured(self) -> MeasuredCosts:
        return measure_costs(lambda rows, sequences, context: self.ms(rows) * self.noise())


@dataclass
class Outcome:
    tokens: float = 0.0  # that the rounds bring on average, given what they verified
    quiet_ms: float = 0.0  # that they take on a machine without noise
    drafted: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Tokens per millisecond, the run's luck apart."""
        return self.tokens / self.quiet_ms


@dataclass
class Run:
    machine: Machine
    drafter: Drafter
    controller: DraftLengthController
    outcome: Outcome = field(default_factory=Outcome)
    num_unread: int = 0  # rounds
    unverified_coins: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        # Of its own, so that what nobody verifies does not change what becomes of the rest.
        self.unverified_coins = np.random.default_rng([self.machine.seed, 1])

    def round(self, loads: list[Load]) -> list[int]:
        """How many drafted tokens of each were accepted."""
        coins, drafter = self.machine.coins, self.drafter
        limits = self.controller.limits(loads)
        hard = self.is_hard(len(loads))
        lengths = [n if coins.random() >= drafter.empty else 0 for n in limits]
        confidences = tuple(
            (self.confidence(hard=bool(hard[i])),) * n for i, n in enumerate(lengths)
        )
        verified = self.controller.choose(confidences) if any(limits) else [0] * len(loads)
        accepted = [
            self._accepted(n, drafter.dull if hard[i] else 1.0) for i, n in enumerate(verified)
        ]
        rows = len(loads) + sum(verified)
        quiet = drafter.ms(limits), self.machine.ms(rows)
        noise = self.machine.noise()
        jitter = float(np.exp(self.machine.jitter * coins.standard_normal()))
        catch_up_ms = drafter.read_ms * self.num_unread * noise if any(limits) else 0.0
        self.num_unread = 0 if any(limits) else self.num_unread + 1
        times = Times(quiet[0] * noise * jitter, quiet[1] * noise, catch_up_ms=catch_up_ms)
        groups = tuple(load.group for load in loads)
        dull = [drafter.dull if each else 1.0 for each in hard]
        last_round = Round(
            tuple(limits), confidences, tuple(verified), tuple(accepted), times, groups=groups,
            foreseen=tuple(map(self._foreseen, lengths, verified, accepted, dull)),
        )  # fmt: skip
        self.controller.observe(last_round)
        self.outcome.tokens += len(loads) + sum(
            self._expected(n, drafter.dull if hard[i] else 1.0) for i, n in enumerate(verified)
        )
        self.outcome.quiet_ms += sum(quiet)
        self.outcome.drafted.append(last_round.num_verified)
        self.outcome.reasons.append(self.controller.reason)
        self.outcome.kinds.append(self.controller.kind)
        return accepted

    def _foreseen(self, length: int, verified: int, accepted: int, dull: float) -> bool | None:
        if accepted < verified or verified == length:
            return None
        return bool(self.unverified_coins.random() < self.drafter.rate(verified) * dull)

    def is_hard(self, num_loads: int) -> np.ndarray:
        """Whose draft is dull in this round."""
        return self.machine.coins.random(num_loads) < self.drafter.hard

    @staticmethod
    def confidence(*, hard: bool) -> float:
        return 0.5 if hard else 0.99

    def _expected(self, most: int, dull: float) -> float:
        rates = [self.drafter.rate(depth) * dull for depth in range(most)]
        return float(np.cumprod(rates).sum())

    def _accepted(self, most: int, dull: float) -> int:
        coins = self.machine.coins.random(most)
        for depth, coin in enumerate(coins):
            if coin >= self.drafter.rate(depth) * dull:
                return depth
        return most


def started(ms: Callable[[int], float], drafter: Drafter, seed: int = 0) -> Run:
    machine = Machine(ms, seed)
    estimates = Estimates(CostTable(machine.measured()))
    return Run(machine, drafter, DraftLengthController(estimates))


def fixed_goodput(ms: Callable[[int], float], drafter: Drafter, num_loads: int, k: int) -> float:
    """Of k tokens for every sequence in every round, on average: tokens per quiet millisecond."""
    rates = np.array([drafter.rate(depth) for depth in range(k)])
    proposing = 1.0 - drafter.empty
    survives = (1.0 - drafter.hard) * np.cumprod(rates)
    survives = survives + drafter.hard * np.cumprod(rates * drafter.dull)
    tokens = num_loads * (1.0 + proposing * survives.sum())
    limits = [k] * num_loads
    # The target's time is not linear, so this is what fixed k takes at best.
    return tokens / (ms(num_loads + round(num_loads * k * proposing)) + drafter.ms(limits))
