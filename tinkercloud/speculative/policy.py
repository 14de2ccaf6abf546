"""How many tokens to draft and how many to verify, so that a round brings the most per millisecond.

In each round the engine asks `limits` before drafting and `choose` once the drafts have come, and
tells `learned` how it went. The policy has no clock and no chance of its own: the same rounds give
the same answers. What it decides costs or saves time and cannot change a token.

It expects of each round what was counted (`acceptance`) and timed (`costs`, `draft_costs`), and
drafts only where that brings more than a plain round. Expectations may be wrong, so:
- it switches on at one margin and off at a smaller one, and does not flap between;
- while off it probes a few sequences, while on a plain round, seldom (`probing`);
- a ledger keeps what speculative rounds brought against what plain ones would have. Where that
  falls behind, whatever the expectation says, it is off until a probe has waited its turn.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from tinkercloud.speculative.acceptance import Acceptance
from tinkercloud.speculative.costs import CostTable
from tinkercloud.speculative.draft_costs import DraftCosts
from tinkercloud.speculative.goodput import Allocation, Limit, allocate
from tinkercloud.speculative.probing import Pace, Probing
from tinkercloud.speculative.rounds import Load, Round

Array = NDArray[np.float64]


class Reason(StrEnum):
    """Why a round had no drafts."""

    NONE = ""
    OFF = "drafter off"
    ALARM = "alarm"
    UNWANTED = "not wanted by the sessions"
    TOO_MANY = "too many sequences"
    ACCEPTANCE = "acceptance too low"
    DRAFTER = "drafter too slow"
    BEHIND = "slower than plain"
    COMPARING = "comparing with plain"
    EMPTY = "nothing drafted"


class Kind(StrEnum):
    PLAIN = "plain"
    SPECULATIVE = "speculative"
    PROBE = "probe"
    COMPARISON = "comparison"


@dataclass(frozen=True, slots=True)
class Settings:
    """max_tokens: drafted for one sequence. max_rows: of one forward. switch_on, switch_off: gains
    over plain. free: the share of a plain round below which drafting costs nothing to speak of, so
    that drafts may be asked for and judged by their confidence. compare_every: rounds while on."""

    max_tokens: int = 8
    max_rows: int = 256
    switch_on: float = 0.05
    switch_off: float = 0.02
    free: float = 0.01
    probe: Pace = Pace()
    probe_tokens: int = 2
    probe_sequences: int = 8
    compare_every: int = 128
    urgency: float = 1.0


@dataclass(slots=True)
class Ledger:
    """What speculative rounds took, against what plain ones would have for the same tokens."""

    memory: float = 0.99
    least_rounds: int = 32
    behind: float = 0.96
    worth_ms: float = 0.0
    spent_ms: float = 0.0
    num_rounds: int = 0

    def add(self, worth_ms: float, spent_ms: float) -> None:
        self.worth_ms = self.memory * self.worth_ms + worth_ms
        self.spent_ms = self.memory * self.spent_ms + spent_ms
        self.num_rounds += 1

    @property
    def is_behind(self) -> bool:
        return self.num_rounds >= self.least_rounds and (
            self.worth_ms < self.behind * self.spent_ms
        )

    def clear(self) -> None:
        self.worth_ms = self.spent_ms = 0.0
        self.num_rounds = 0


@dataclass(slots=True)
class Knowledge:
    """What is known of the target's time, of the drafter's, and of its tokens."""

    costs: CostTable
    drafting: DraftCosts = field(default_factory=DraftCosts)
    acceptance: Acceptance = field(default_factory=Acceptance)


class Policy:
    """Of one drafter; `reason` and `kind` are those of the last round."""

    def __init__(self, knowledge: Knowledge, settings: Settings | None = None) -> None:
        self._known = knowledge
        self._settings = settings or Settings()
        self._probing = Probing(self._settings.probe)
        self._ledger = Ledger()
        self._loads: tuple[Load, ...] = ()
        self._asked: tuple[int, ...] = ()
        self._stopped = Reason.NONE
        self._is_on = False
        self._since_compared = 0
        self._probed_first = 0
        self.reason = Reason.NONE
        self.kind = Kind.PLAIN

    @property
    def is_on(self) -> bool:
        return self._is_on and not self._stopped

    def stop(self, reason: Reason) -> None:
        """No drafts until `resume`."""
        self._stopped = reason
        self._is_on = False

    def resume(self) -> None:
        self._stopped = Reason.NONE
        self.renew()

    def renew(self) -> None:
        """New weights, or a new draft: what was counted is worth less, and is tried again soon."""
        self._known.acceptance.age(0.25)
        self._probing.hurry()

    # ---- before drafting

    def limits(self, loads: Sequence[Load]) -> list[int]:
        """Tokens to ask the drafter for, at most, of each sequence; 0: not to ask."""
        self._loads = tuple(loads)
        self._asked = self._asking() if loads else ()
        return list(self._asked)

    def _asking(self) -> tuple[int, ...]:
        nobody = (0,) * len(self._loads)
        self.kind, self.reason = Kind.PLAIN, self._stopped
        if self._stopped:
            return nobody
        if not any(load.speculates for load in self._loads):
            self.reason = Reason.UNWANTED
            return nobody
        plan = self._planned()
        self._switch(plan)
        if not self._is_on and self._probing.due(self._probe_loss_ms()):
            self.kind = Kind.PROBE
            return self._probe()
        if self._is_on and self._since_compared >= self._settings.compare_every:
            self.kind, self.reason = Kind.COMPARISON, Reason.COMPARING
            return nobody
        if self._is_on or (self._is_free() and self._may_choose()):
            self.kind, self.reason = Kind.SPECULATIVE, Reason.NONE
            return self._all_asked() if self._is_free() else plan.counts
        self.reason = self._why()
        return nobody

    def _switch(self, plan: Allocation) -> None:
        margin = self._settings.switch_off if self._is_on else self._settings.switch_on
        self._is_on = plan.gain > margin and self._may_choose()
        if not self._is_on:
            self._since_compared = 0

    def _may_choose(self) -> bool:
        return not self._ledger.is_behind

    def _all_asked(self) -> tuple[int, ...]:
        room = max(0, self._settings.max_rows - len(self._loads))
        most = self._settings.max_tokens if room else 0
        return tuple(most if load.speculates else 0 for load in self._loads)

    def _is_free(self) -> bool:
        """Drafting for everybody costs nothing to speak of."""
        asked = self._all_asked()
        drafting = self._known.drafting.ms(sum(asked), max(asked))
        return drafting <= self._settings.free * self._plain_ms()

    def _planned(self, *, surely: bool = False, freely: bool = False) -> Allocation:
        """What to ask for. surely: as if every token stood; freely: as if drafting cost nothing."""
        rows, survival = self._known.acceptance.foreseen(len(self._loads), self._groups())
        wanted = np.array([[float(load.speculates)] for load in self._loads])
        rows, survival = rows * wanted, (rows if surely else survival) * wanted
        best: Allocation | None = None
        for steps in self._depths():
            found = allocate(
                survival[:, :steps],
                rows[:, :steps],
                lambda taken, tokens, steps=steps: self._round_ms(
                    taken, tokens * (not freely), steps * (not freely)
                ),
                self._plain_ms(),
                self._limit(),
            )
            if best is None or found.goodput > best.goodput:
                best = found
        assert best is not None
        return best

    def _depths(self) -> Sequence[int]:
        """Depths worth trying: all where one more costs a step, else the deepest alone."""
        most = self._settings.max_tokens
        return range(1, most + 1) if self._known.drafting.step_ms > 0 else (most,)

    def _round_ms(self, rows: Array, tokens: Array, steps: int) -> Array:
        """Of drafting `tokens` and verifying `rows` of them, both (N + 1,)."""
        drafting = self._known.drafting.ms(0.0, steps) + self._known.drafting.token_ms * tokens
        return self._target_ms(rows) + np.where(tokens > 0, drafting, 0.0)

    def _target_ms(self, rows: Array) -> Array:
        many = len(self._loads)
        return self._known.costs.verify_ms(many + rows, many, self._context())

    def _plain_ms(self) -> float:
        return self._known.costs.plain_ms(len(self._loads), self._context())

    def _context(self) -> float:
        return sum(load.context for load in self._loads) / len(self._loads)

    def _groups(self) -> tuple[Hashable, ...]:
        return tuple(load.group for load in self._loads)

    def _limit(self) -> Limit:
        room = max(0, self._settings.max_rows - len(self._loads))
        return Limit(room, urgency(self._loads, self._settings.urgency))

    # ---- once the drafts have come

    def choose(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        """How many tokens of each draft to verify; of the sequences of the last `limits`."""
        assert len(confidences) == len(self._loads), "drafts of other sequences"
        lengths = [min(len(c), n) for c, n in zip(confidences, self._asked, strict=True)]
        if not any(lengths):
            self.reason = self.reason or Reason.EMPTY
            return lengths
        if self.kind is Kind.PROBE:
            return [min(n, self._settings.probe_tokens) for n in lengths]
        survival = self._known.acceptance.survivals(confidences, self._groups())
        survival[np.arange(survival.shape[1]) >= np.array(lengths)[:, None]] = 0.0
        found = allocate(
            survival,
            np.ones_like(survival),
            lambda taken, tokens: self._target_ms(taken),
            self._plain_ms(),
            self._limit(),
        )
        if found.gain > self._settings.switch_off:
            return list(found.counts)
        self.reason = self._why()
        return [0] * len(lengths)

    # ---- while off

    def _probe(self) -> tuple[int, ...]:
        """A few sequences, others each time."""
        willing = [i for i, load in enumerate(self._loads) if load.speculates]
        room = max(0, self._settings.max_rows - len(self._loads)) // self._settings.probe_tokens
        many = min(self._settings.probe_sequences, len(willing), room)
        first = self._probed_first % len(willing)
        self._probed_first += many
        chosen = (willing[first:] + willing[:first])[:many]
        return tuple(
            self._settings.probe_tokens if i in chosen else 0 for i in range(len(self._loads))
        )

    def _probe_loss_ms(self) -> float:
        """Of a probe of which nothing stands."""
        settings = self._settings
        tokens = settings.probe_tokens * min(settings.probe_sequences, len(self._loads))
        drafting = self._known.drafting.ms(tokens, settings.probe_tokens)
        return float(self._target_ms(np.array([tokens]))[0]) + drafting - self._plain_ms()

    def _why(self) -> Reason:
        if self._ledger.is_behind:
            return Reason.BEHIND
        if self._planned(surely=True, freely=True).gain <= self._settings.switch_on:
            return Reason.TOO_MANY
        if self._planned(freely=True).gain <= self._settings.switch_on:
            return Reason.ACCEPTANCE
        return Reason.DRAFTER

    # ---- after the round

    def learned(self, told: Round) -> None:
        """The round of the last `limits` is over."""
        known, times = self._known, told.times
        plain_ms = known.costs.plain_ms(told.num_sequences, told.context)
        if times.usable:
            known.costs.observe(
                told.num_rows, told.num_sequences, told.context, times.target_ms
            )
            known.drafting.observe(sum(told.asked), max(told.asked, default=0), times.draft_ms)
        if any(told.asked):
            known.acceptance.learn(told)
        self._probing.passed(times.all_ms)
        worth_ms = plain_ms * told.num_emitted / told.num_sequences
        if self.kind is Kind.PROBE:
            self._probed(told, worth_ms)
        elif self.kind is Kind.SPECULATIVE:
            self._since_compared += 1
            if times.usable:
                self._ledger.add(worth_ms, times.all_ms)
        elif self.kind is Kind.COMPARISON:
            self._since_compared = 0

    def _probed(self, told: Round, worth_ms: float) -> None:
        """A probe that broke even was well; then the ledger's grudge ends too."""
        spent_ms = told.times.all_ms
        well = told.num_verified > 0 and worth_ms >= spent_ms
        self._probing.told(well=well, loss_ms=spent_ms - worth_ms)
        self._ledger.clear()


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
