"""How many tokens to draft and how many to verify, so that a round brings the most per millisecond.

The controller has no clock and no randomness of its own: the same rounds give the same answers.
What it decides costs or saves time and cannot change a token.

It drafts only where that is expected to bring more than a plain round (`planning`). Expectations
may be wrong, so:
- hysteresis: it switches on at one gain and off at a smaller one, and does not flap between;
- warm-up: a new drafter has a few rounds with few drafts, to measure its times;
- probing: while off it seldom drafts for a few sequences (`probing`); while on it makes a plain
  round now and then;
- a profit tracker compares what speculative rounds brought with what plain ones would have. Where
  that falls behind, whatever the expectation says, it is off for a while (`profit_tracker`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from tinkercloud.speculative.draft_length.fixed_length import DraftLength
from tinkercloud.speculative.draft_length.planning import Estimates, Planner, PlannerSettings
from tinkercloud.speculative.draft_length.probing import ProbeSchedule, Probing
from tinkercloud.speculative.draft_length.profit_tracker import ProfitTracker
from tinkercloud.speculative.draft_length.rounds import Kind, Load, Reason, Round

# Speculative rounds before the first plain one, then twice as many each time: a wrong table shows
# at the first comparisons, and later ones only cost.
FIRST_COMPARISON = 4
# Times as many where drafts cost nothing: only their rows may be dearer than they seem. Where they
# are expected to gain little, a plain round costs little, and tells whether they gain at all.
FREE_PATIENCE, FREE_GAIN = 32, 2.0
# Share of a plain round below which the first draft's time ends the warm-up: what a step costs is
# not known yet, so less than what is taken to cost nothing later.
NEGLIGIBLE = 0.01
# Where drafts cost nothing, speculative rounds that are learned from together, at most, and the
# share of their tokens in what is known: while the target's weights have every cache, code that
# runs again at once takes a third. The second ones where drafts gain as much as GREAT_GAIN: there
# no single round changes what is decided, and one that brought nothing may wait too.
MOST_UNLEARNED, UNLEARNED_SHARE = (4, 8), (0.1, 0.25)
GREAT_GAIN = 1.0


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """switch_off: the gain over plain below which it stops; it starts at planner.worthwhile.
    compare_every: rounds from one plain round to the next while on, less at first. warm_up:
    sequences and tokens of a new drafter's rounds, such that costs by round, by step and by token
    can be told apart (`draft_costs`)."""

    planner: PlannerSettings = field(default_factory=PlannerSettings)
    switch_off: float = 0.02
    compare_every: int = 128
    warm_up: tuple[tuple[int, int], ...] = ((1, 1), (8, 2), (1, 8), (8, 1))
    probe: ProbeSchedule = field(default_factory=ProbeSchedule)
    probe_tokens: int = 2
    probe_sequences: int = 8


@dataclass(frozen=True, slots=True)
class _Past:
    """A round that is over. free: whether drafts cost nothing."""

    kind: Kind
    free: bool
    round: Round


class DraftLengthController(DraftLength):
    """Of one drafter."""

    def __init__(self, estimates: Estimates, settings: ControllerSettings | None = None) -> None:
        self._estimates = estimates
        self._settings = settings or ControllerSettings()
        self._planner = Planner(estimates, self._settings.planner)
        self._probing = Probing(self._settings.probe)
        self._profit = ProfitTracker()
        self._loads: tuple[Load, ...] = ()
        self._limits: tuple[int, ...] = ()
        self._stopped = Reason.NONE
        self._since_compared = 0
        self._next_comparison = FIRST_COMPARISON
        self._next_probed = 0
        self._free = False
        self._unlearned: list[_Past] = []  # the newest rounds
        self._num_unlearned = 0  # drafted tokens
        # Since the last `limits`: milliseconds, sequences, whether the time is usable.
        self._skipped: list[tuple[float, int, bool]] = []
        self.is_on = False
        self.kind = Kind.PLAIN
        self.reason = Reason.NONE
        self.unsure_below = 0.0

    def stop(self, reason: Reason) -> None:
        self._stopped = reason
        self.is_on = False

    def renew(self, expected: Sequence[float] = ()) -> None:
        """What was counted is worth less, and drafting is tried again soon; at once where that is
        expected to pay, by the times that were measured: what a slow minute taught must not keep a
        better draft from being tried."""
        self._learn()
        if expected:
            self._estimates.acceptance.expect(expected)
            self._estimates.costs.doubt()
            self._estimates.drafting.forget()  # it is met anew
        else:
            self._estimates.acceptance.doubt()
        self._probing.hasten()
        self._profit.reset()
        self._planner.discard_plan()

    # ---- before drafting

    def limits(self, loads: Sequence[Load]) -> list[int]:
        settings = self._settings
        self._loads = tuple(loads)
        self._learn_skipped()
        if self._unlearned and not self._stopped and self._planner.serves(self._loads):
            self.reason = Reason.NONE
            return list(self._limits)  # nothing was learned since they were decided
        self.kind, self.reason = self._decide()
        self.unsure_below = 0.0
        if self.kind is Kind.SPECULATIVE:
            # Where asking is free, the drafter's confidence decides later, not its mean rate.
            self._free = self._planner.is_free
            if not self._free:
                self.unsure_below = self._planner.unsure_below
            self._limits = self._planner.longest() if self._free else self._planner.plan.counts
        elif self.kind is Kind.PROBE:
            self._limits = self._for_few(settings.probe_sequences, settings.probe_tokens)
        elif self.kind is Kind.WARM_UP:
            self._limits = self._for_few(*settings.warm_up[self._estimates.drafting.num_rounds])
        else:
            self._limits = (0,) * len(loads)
        return list(self._limits)

    def _decide(self) -> tuple[Kind, Reason]:
        if self._stopped:
            return Kind.PLAIN, self._stopped
        if not any(load.speculates for load in self._loads):
            return Kind.PLAIN, Reason.UNWANTED
        self._planner.set_loads(self._loads)
        self.is_on = not self._profit.is_barred and self._planner.plan.gain > self._margin
        if self._is_warming_up:
            return Kind.WARM_UP, Reason.NONE
        if self.is_on and self._since_compared >= self._rounds_to_compare:
            return Kind.COMPARISON, Reason.COMPARING
        if not self.is_on and self._probing.due(self._probe_loss_ms()):
            return Kind.PROBE, Reason.NONE
        if self._profit.is_barred:
            return Kind.PLAIN, Reason.BEHIND
        if self.is_on or (self._planner.is_free and self._planner.may_pay):
            return Kind.SPECULATIVE, Reason.NONE
        return Kind.PLAIN, self._planner.reason

    @property
    def _rounds_to_compare(self) -> int:
        """From one plain round to the next."""
        if not self._planner.is_free:
            return self._next_comparison
        share = min(1.0, max(0.0, self._planner.plan.gain / FREE_GAIN))
        return round(self._next_comparison * (1 + share * (FREE_PATIENCE - 1)))

    @property
    def _is_warming_up(self) -> bool:
        """The drafter's times are not known yet, and the first of them was neither too slow nor
        negligible."""
        num_seen = self._estimates.drafting.num_rounds
        if num_seen >= len(self._settings.warm_up):
            return False
        if num_seen and self._planner.longest_share <= NEGLIGIBLE:
            return False
        too_slow = self._planner.drafting_ms(1, 1) > self._planner.plain_ms()
        return not too_slow and self._planner.rows_left > 0

    @property
    def _margin(self) -> float:
        """The gain that is asked for: less once it is on."""
        settings = self._settings
        return settings.switch_off if self.is_on else settings.planner.worthwhile

    # ---- once the drafts have come

    def choose(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        assert len(confidences) == len(self._loads), "drafts of other sequences"
        lengths = [min(len(c), n) for c, n in zip(confidences, self._limits, strict=True)]
        if not any(lengths):
            self.reason = self.reason or Reason.EMPTY
            return lengths
        if self.kind in (Kind.PROBE, Kind.WARM_UP):
            return lengths
        allocation = self._planner.allocate_drafts(confidences, lengths)
        if allocation.gain > self._margin:
            return list(allocation.counts)
        too_many = self._planner.reason is Reason.TOO_MANY
        self.reason = Reason.TOO_MANY if too_many else Reason.ACCEPTANCE
        return [0] * len(lengths)

    # ---- while off, or new

    def _for_few(self, sequences: int, tokens: int) -> tuple[int, ...]:
        """So many tokens for so many sequences at most, others each time."""
        willing = [i for i, load in enumerate(self._loads) if load.speculates]
        rows_left = self._planner.rows_left
        tokens = max(1, min(tokens, self._settings.planner.max_tokens, rows_left))
        many = min(sequences, len(willing), rows_left // tokens)
        first = self._next_probed % len(willing)
        self._next_probed = first + many
        chosen = set((willing[first:] + willing[:first])[:many])
        return tuple(tokens if i in chosen else 0 for i in range(len(self._loads)))

    def _probe_loss_ms(self) -> float:
        settings = self._settings
        tokens = settings.probe_tokens * min(settings.probe_sequences, len(self._loads))
        return self._planner.probe_loss_ms(tokens, settings.probe_tokens)

    # ---- after the round

    def observe(self, last_round: Round) -> None:
        self._unlearned.append(_Past(self.kind, self._free, last_round))
        self._num_unlearned += sum(last_round.num_compared)
        if not any(last_round.confidences):
            self._planner.keep_plan()
        if self.kind is not Kind.SPECULATIVE and self.kind is not Kind.PLAIN:
            self._planner.discard_plan()  # made to learn from
        if not self._may_wait(last_round):
            self._learn()

    def _may_wait(self, last_round: Round) -> bool:
        """Whether others are learned from together with this one."""
        if self.kind is not Kind.SPECULATIVE or not self._free:
            return False
        great = self._planner.plan.gain >= GREAT_GAIN
        if len(self._unlearned) >= MOST_UNLEARNED[great]:
            return False
        if not great and last_round.num_verified > 2 * sum(last_round.accepted):
            return False  # bad news does not wait
        return self._num_unlearned <= UNLEARNED_SHARE[great] * self._estimates.acceptance.num_known

    def _learn(self) -> None:
        past, self._unlearned, self._num_unlearned = self._unlearned, [], 0
        for each in past:
            # Before learning: what was expected of a plain round when this one was chosen.
            shape = each.round.num_sequences, each.round.context
            plain_ms = self._estimates.costs.plain_ms(*shape)
            self._learn_times(each.round)
            self._weigh(each, plain_ms * each.round.num_emitted / each.round.num_sequences)
        drafted = [each.round for each in past if any(each.round.limits)]
        if drafted:
            self._estimates.acceptance.learn(drafted)

    def _weigh(self, past: _Past, worth_ms: float) -> None:
        """worth_ms: that plain rounds take for as many tokens."""
        last_round, times = past.round, past.round.times
        self._probing.advance(times.all_ms)
        self._profit.advance()
        if past.kind is Kind.PROBE:
            # One that broke even was well: once drafting is on, there is nothing to catch up with.
            well = last_round.num_verified > 0 and worth_ms >= times.steady_ms
            self._probing.observe(well=well, loss_ms=times.all_ms - worth_ms)
            self._profit.observe_probe(well=well)
        elif past.kind is Kind.COMPARISON:
            self._since_compared = 0
            self._next_comparison = min(2 * self._next_comparison, self._settings.compare_every)
        elif past.kind is Kind.SPECULATIVE:
            self._since_compared += 1
            if last_round.num_verified:
                self._probing.rest()
            if times.usable and (last_round.num_verified or not past.free):
                self._profit.add(worth_ms, times.all_ms, last_round.num_sequences)

    def skipped(self, ms: float, num_sequences: int, *, usable: bool) -> None:
        self._skipped.append((ms, num_sequences, usable))

    def _learn_skipped(self) -> None:
        """They are plain rounds, and the newest: a machine that became slower since the last one
        with drafts must not look as if those took longer."""
        skipped, self._skipped = self._skipped, []
        for ms, _, _ in skipped:
            self._probing.advance(ms)
            self._profit.advance()
        many = skipped[-1][1] if skipped else 0
        alike = [ms for ms, num, usable in skipped if usable and num == many]
        if alike:
            context = sum(load.context for load in self._loads) / len(self._loads)
            self._estimates.costs.observe(many, many, context, median(alike), num_rounds=len(alike))

    def _learn_times(self, last_round: Round) -> None:
        estimates, times = self._estimates, last_round.times
        slowdown = estimates.costs.slowdown
        if times.usable:
            shape = last_round.num_rows, last_round.num_sequences, last_round.context
            slowdown = estimates.costs.observe(*shape, times.target_ms)
        steps = max(last_round.limits, default=0)
        estimates.drafting.observe(sum(last_round.limits), steps, times.draft_ms / slowdown)
