"""What is expected of the next round: which drafts would pay, and if none, why not.

Axes: B sequences, D depths, N = B * D drafted tokens.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tinkercloud.speculative.draft_length.acceptance import Acceptance
from tinkercloud.speculative.draft_length.costs import CostTable
from tinkercloud.speculative.draft_length.draft_costs import DraftCosts
from tinkercloud.speculative.draft_length.goodput import Allocation, Limit, allocate, choose
from tinkercloud.speculative.draft_length.rounds import Load, Reason

Array = NDArray[np.float64]
LEAST_LONGEST = 8  # tokens of each draft that many sequences may have
BEST_RATE = 0.9  # of drafted tokens accepted, that one may hope for
# A plan serves so many rounds after its first, more where drafts cost nothing and are asked for
# whatever it says, and one more for each so many sequences, since making it takes time in
# proportion to them. Where nothing is drafted nothing is learned: a plan then serves for
# IDLE_ROUNDS.
PLAN_ROUNDS, FREE_PLAN_ROUNDS, SEQUENCES_OF_ROUND, IDLE_ROUNDS = 3, 7, 16, 16


@dataclass(slots=True)
class Estimates:
    """Of the target's time, of the drafter's, and of how many of its tokens are accepted."""

    costs: CostTable
    drafting: DraftCosts = field(default_factory=DraftCosts)
    acceptance: Acceptance = field(default_factory=Acceptance)


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """max_tokens: drafted for one sequence. max_rows: of one forward. urgency: what the most urgent
    sequence weighs more than others. free: the share of a plain round below which drafting is
    taken to cost nothing. worthwhile: the least gain."""

    max_tokens: int = 8
    max_rows: int = 256
    urgency: float = 1.0
    free: float = 0.03
    worthwhile: float = 0.05


class Planner:
    def __init__(self, estimates: Estimates, settings: PlannerSettings) -> None:
        self._estimates = estimates
        self._settings = settings
        self._loads: tuple[Load, ...] = ()
        self._context = 0.0
        self._plan: Allocation | None = None
        self._reason: Reason | None = None
        self._rounds_left = self._idle_rounds_left = 0
        # Of these sequences, until others come:
        self._plain_ms: float | None = None
        self._longest_share: float | None = None
        self._times_plain: list[float] | None = None
        self._may_pay: bool | None = None

    def set_loads(self, loads: Sequence[Load]) -> None:
        """The sequences of the next round, one at least."""
        speculating = [load.speculates for load in loads]
        changed = speculating != [load.speculates for load in self._loads]
        self._loads = tuple(loads)
        self._context = sum(load.context for load in loads) / len(loads)
        self._plain_ms = self._longest_share = None
        self._rounds_left -= 1
        if changed or self._rounds_left < 0:
            self._plan = self._reason = self._times_plain = self._may_pay = None
            rounds = FREE_PLAN_ROUNDS if self.is_free else PLAN_ROUNDS
            self._rounds_left = rounds + len(loads) // SEQUENCES_OF_ROUND
            self._idle_rounds_left = IDLE_ROUNDS

    def serves(self, loads: Sequence[Load]) -> bool:
        """Whether the plan does for these sequences too, which then are those of the next round."""
        speculating = [load.speculates for load in loads]
        alike = speculating == [load.speculates for load in self._loads]
        if not alike or self._rounds_left <= 0:
            return False
        self._loads = tuple(loads)
        self._rounds_left -= 1
        return True

    def keep_plan(self) -> None:
        """In the round that is over nothing was drafted."""
        if self._idle_rounds_left:
            self._idle_rounds_left -= 1
            self._rounds_left += 1

    def discard_plan(self) -> None:
        """What the plan was made of has changed."""
        self._rounds_left = self._idle_rounds_left = 0

    @property
    def plan(self) -> Allocation:
        """What to ask of the drafter."""
        if self._plan is None:
            self._plan = self._best_plan()
        return self._plan

    @property
    def may_pay(self) -> bool:
        """Whether any number of drafted tokens is worth its rows if all are accepted."""
        if self._may_pay is None:
            many, least = len(self._loads), 1.0 + self._settings.worthwhile
            times = enumerate(self._in_plain_rounds())
            self._may_pay = any((many + num) / many > least * time for num, time in times)
        return self._may_pay

    @property
    def reason(self) -> Reason:
        """Why nothing is drafted, if nothing is: what would have to be otherwise."""
        if self._reason is None:
            least = self._settings.worthwhile
            if not self.may_pay or self._best_plan(perfect=True, free=True).gain <= least:
                self._reason = Reason.TOO_MANY
            elif self._best_plan(free=True).gain <= least:
                self._reason = Reason.ACCEPTANCE
            else:
                self._reason = Reason.DRAFTER
        return self._reason

    def _best_plan(self, *, perfect: bool = False, free: bool = False) -> Allocation:
        """perfect: as if drafts were accepted as often as any are; free: as if they cost nothing.

        All depths are tried where one more costs a step, else the deepest only.
        """
        rows, survival = self._forecast(free=free or self.is_free)
        if perfect:
            rows = np.ones_like(rows)
            survival[:] = np.cumprod(BEST_RATE * rows, 1)
        survival = survival * np.array([[float(load.speculates)] for load in self._loads])
        most = self._settings.max_tokens
        depths = (most,) if free or self.is_free else range(1, most + 1)
        plans = [self._plan_of_depth(survival[:, :d], rows[:, :d], free) for d in depths]
        return max(plans, key=lambda allocation: allocation.goodput)

    def _forecast(self, *, free: bool) -> tuple[Array, Array]:
        many, acceptance = len(self._loads), self._estimates.acceptance
        if free:
            return acceptance.forecast(many, self._groups())
        return acceptance.forecast_chosen(many, self._groups(), self._least_rate())

    def _least_rate(self) -> float:
        """The rate from which on a drafted token may be worth its row: what a row takes, where it
        takes least, as a share of the plain round's time for a token."""
        depths = np.arange(1.0, self._settings.max_tokens + 1.0)
        more = self.target_ms(len(self._loads) * depths) / self.plain_ms() - 1.0
        return float(np.min(more / depths))

    @property
    def unsure_below(self) -> float:
        """The confidence that is not worth a row."""
        return self._estimates.acceptance.sure_above(self._least_rate())

    def _plan_of_depth(self, survival: Array, rows: Array, free: bool) -> Allocation:
        drafting, steps = self._estimates.drafting, survival.shape[1]

        def cost(taken: Array, tokens: Array) -> Array:
            if free:
                return self.target_ms(taken)
            asking = drafting.ms(0.0, steps) + drafting.token_ms * tokens
            asking_ms = np.where(tokens > 0, asking * self._estimates.costs.slowdown, 0.0)
            return self.target_ms(taken) + asking_ms

        return allocate(survival, rows, cost, self.plain_ms(), self._limit())

    def allocate_drafts(
        self, confidences: Sequence[Sequence[float]], lengths: Sequence[int]
    ) -> Allocation:
        """Which drafted tokens to verify, of each draft the first `lengths` at most."""
        drafts = [draft[:length] for draft, length in zip(confidences, lengths, strict=True)]
        survivals = self._estimates.acceptance.survivals(drafts, self._groups())
        return choose(survivals, self._in_plain_rounds(), self.plain_ms(), self._limit())

    def _in_plain_rounds(self) -> list[float]:
        """How long a round with 0, 1, 2, ... drafted rows takes, as long as the plan serves."""
        if self._times_plain is None:
            most = min(self.rows_left, len(self._loads) * self._settings.max_tokens)
            times: list[float] = (self.target_ms(np.arange(most + 1.0)) / self.plain_ms()).tolist()
            self._times_plain = times
        return self._times_plain

    # ---- the sequences as they are

    def target_ms(self, rows: Array) -> Array:
        """Of a forward with so many drafted rows, (N,)."""
        many = len(self._loads)
        return self._estimates.costs.verify_ms(many + rows, many, self._context)

    def drafting_ms(self, tokens: int, steps: int) -> float:
        return self._estimates.costs.slowdown * self._estimates.drafting.ms(tokens, steps)

    def plain_ms(self) -> float:
        if self._plain_ms is None:
            self._plain_ms = self._estimates.costs.plain_ms(len(self._loads), self._context)
        return self._plain_ms

    @property
    def rows_left(self) -> int:
        """Of a forward, for drafts."""
        return max(0, self._settings.max_rows - len(self._loads))

    def longest(self) -> tuple[int, ...]:
        """As many tokens of each sequence as may be drafted at all. Of many, together about as many
        as a forward has rows: more would be drafted and judged for nothing."""
        settings = self._settings
        most = max(LEAST_LONGEST, settings.max_rows // len(self._loads)) if self.rows_left else 0
        most = min(most, settings.max_tokens)
        return tuple(most if load.speculates else 0 for load in self._loads)

    @property
    def is_free(self) -> bool:
        """The longest drafts for all cost next to nothing: their confidence may decide."""
        return self.longest_share <= self._settings.free

    @property
    def longest_share(self) -> float:
        """Of a plain round: what the longest drafts for all are expected to cost."""
        if self._longest_share is None:
            lengths = self.longest()
            longest_ms = self.drafting_ms(sum(lengths), max(lengths))
            self._longest_share = longest_ms / self.plain_ms()
        return self._longest_share

    def probe_loss_ms(self, tokens: int, steps: int) -> float:
        """Of drafting and verifying so many, if none is accepted."""
        forward = float(self.target_ms(np.array([float(tokens)]))[0])
        return forward + self.drafting_ms(tokens, steps) - self.plain_ms()

    def _groups(self) -> tuple[Hashable, ...]:
        return tuple(load.group for load in self._loads)

    def _limit(self) -> Limit:
        return Limit(self.rows_left, urgency(self._loads, self._settings.urgency))


def urgency(loads: Sequence[Load], weight: float) -> Array | None:
    """(B,) at least 1: of the sequence predicted longest, and of a group's last, 1 + weight, since
    others wait for them (DAS 2511.13841). None where all are alike."""
    if len(loads) == 1:
        return None
    longest = max((load.remaining for load in loads), default=0.0)
    shares = [
        1.0 if load.num_living == 1 and load.group is not None else _share(load, longest)
        for load in loads
    ]
    return 1.0 + weight * np.array(shares) if len(set(shares)) > 1 else None


def _share(load: Load, longest: float) -> float:
    return load.remaining / longest if longest > 0 else 0.0
