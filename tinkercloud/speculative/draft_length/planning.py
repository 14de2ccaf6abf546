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
from tinkercloud.speculative.draft_length.goodput import Allocation, Limit, allocate
from tinkercloud.speculative.draft_length.rounds import Load, Reason

Array = NDArray[np.float64]
BEST_RATE = 0.9  # of drafted tokens that stand, that one may hope for
PLAN_ROUNDS = 3  # that a plan serves after its first, and one more for each so many sequences:
SEQUENCES_OF_ROUND = 16  # making it takes time as well


@dataclass(slots=True)
class Estimates:
    """What is known of the target's time, of the drafter's, and of its tokens."""

    costs: CostTable
    drafting: DraftCosts = field(default_factory=DraftCosts)
    acceptance: Acceptance = field(default_factory=Acceptance)


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """max_tokens: drafted for one sequence. max_rows: of one forward. urgency: what the most urgent
    sequence weighs more than others. free: the share of a plain round below which drafting costs
    nothing to speak of. worthwhile: the least gain."""

    max_tokens: int = 8
    max_rows: int = 256
    urgency: float = 1.0
    free: float = 0.01
    worthwhile: float = 0.05


class Planner:
    def __init__(self, knowledge: Estimates, bounds: PlannerSettings) -> None:
        self._known = knowledge
        self._bounds = bounds
        self._loads: tuple[Load, ...] = ()
        self._context = 0.0
        self._plan: Allocation | None = None
        self._why: Reason | None = None
        self._rounds_left = 0
        self._plain_ms: float | None = None  # of these sequences, until others come

    def face(self, loads: Sequence[Load]) -> None:
        """The sequences of the next round, one at least."""
        changed = _who(loads) != _who(self._loads)
        self._loads = tuple(loads)
        self._context = sum(load.context for load in loads) / len(loads)
        self._plain_ms = None
        self._rounds_left -= 1
        if changed or self._rounds_left < 0:
            self._plan = self._why = None
            self._rounds_left = PLAN_ROUNDS + len(loads) // SEQUENCES_OF_ROUND

    def forget(self) -> None:
        """What the plan was made of has changed."""
        self._rounds_left = 0

    @property
    def plan(self) -> Allocation:
        """What to ask of the drafter."""
        if self._plan is None:
            self._plan = self._planned()
        return self._plan

    @property
    def why(self) -> Reason:
        """Why nothing is drafted, if nothing is."""
        if self._why is None:
            self._why = self._explained()
        return self._why

    def _explained(self) -> Reason:
        if self._planned(surely=True, freely=True).gain <= self._bounds.worthwhile:
            return Reason.TOO_MANY
        if self._planned(freely=True).gain <= self._bounds.worthwhile:
            return Reason.ACCEPTANCE
        return Reason.DRAFTER

    def _planned(self, *, surely: bool = False, freely: bool = False) -> Allocation:
        """surely: as if drafts stood as well as any do; freely: as if they cost nothing."""
        rows, survival = self._known.acceptance.forecast(len(self._loads), self._groups())
        wanted = np.array([[float(load.speculates)] for load in self._loads])
        if surely:
            rows = np.ones_like(rows)
            survival[:] = np.cumprod(BEST_RATE * rows, 1)
        survival = survival * wanted
        found = [
            self._allocated(survival[:, :steps], rows[:, :steps], freely)
            for steps in self._depths(freely)
        ]
        return max(found, key=lambda allocation: allocation.goodput)

    def _depths(self, freely: bool) -> Sequence[int]:
        """Depths worth trying: all where one more costs a step to speak of, else the deepest."""
        most = self._bounds.max_tokens
        return (most,) if freely or self.is_free else range(1, most + 1)

    def _allocated(self, survival: Array, rows: Array, freely: bool) -> Allocation:
        drafting, steps = self._known.drafting, survival.shape[1]

        def cost(taken: Array, tokens: Array) -> Array:
            if freely:
                return self.target_ms(taken)
            asking = drafting.ms(0.0, steps) + drafting.token_ms * tokens
            return self.target_ms(taken) + np.where(tokens > 0, asking * self._pace, 0.0)

        return allocate(survival, rows, cost, self.plain_ms(), self._limit())

    def chosen(self, confidences: Sequence[Sequence[float]], lengths: Sequence[int]) -> Allocation:
        """Which drafted tokens to verify, of each draft the first `lengths` at most."""
        survival = self._known.acceptance.survivals(confidences, self._groups())
        survival[np.arange(survival.shape[1]) >= np.array(lengths)[:, None]] = 0.0
        return allocate(
            survival,
            np.ones_like(survival),
            lambda taken, _: self.target_ms(taken),
            self.plain_ms(),
            self._limit(),
        )

    # ---- the sequences as they are

    def target_ms(self, rows: Array) -> Array:
        """Of a forward with so many drafted rows, (N,)."""
        many = len(self._loads)
        return self._known.costs.verify_ms(many + rows, many, self._context)

    def drafting_ms(self, tokens: int, steps: int) -> float:
        return self._pace * self._known.drafting.ms(tokens, steps)

    @property
    def _pace(self) -> float:
        return self._known.costs.pace

    def plain_ms(self) -> float:
        if self._plain_ms is None:
            self._plain_ms = self._known.costs.plain_ms(len(self._loads), self._context)
        return self._plain_ms

    @property
    def room(self) -> int:
        """Rows that are left for drafts."""
        return max(0, self._bounds.max_rows - len(self._loads))

    def everybody(self) -> tuple[int, ...]:
        """As many tokens as may be drafted at all."""
        most = self._bounds.max_tokens if self.room else 0
        return tuple(most if load.speculates else 0 for load in self._loads)

    @property
    def is_free(self) -> bool:
        """Asking for everybody costs nothing to speak of: the drafts' confidence may decide."""
        asked = self.everybody()
        return self.drafting_ms(sum(asked), max(asked)) <= self._bounds.free * self.plain_ms()

    def probe_loss_ms(self, tokens: int, steps: int) -> float:
        """Of drafting and verifying so many, if none stands."""
        forward = float(self.target_ms(np.array([float(tokens)]))[0])
        return forward + self.drafting_ms(tokens, steps) - self.plain_ms()

    def _groups(self) -> tuple[Hashable, ...]:
        return tuple(load.group for load in self._loads)

    def _limit(self) -> Limit:
        return Limit(self.room, urgency(self._loads, self._bounds.urgency))


def urgency(loads: Sequence[Load], weight: float) -> Array | None:
    """(B,) at least 1: of the sequence predicted longest, and of a group's last, 1 + weight, since
    others wait for them (DAS 2511.13841). None where all are alike."""
    longest = max((load.remaining for load in loads), default=0.0)
    shares = [
        1.0 if load.num_living == 1 and load.group is not None else _share(load, longest)
        for load in loads
    ]
    return 1.0 + weight * np.array(shares) if len(set(shares)) > 1 else None


def _share(load: Load, longest: float) -> float:
    return load.remaining / longest if longest > 0 else 0.0


def _who(loads: Sequence[Load]) -> list[bool]:
    return [load.speculates for load in loads]
