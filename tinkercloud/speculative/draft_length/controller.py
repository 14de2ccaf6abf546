"""How many tokens to draft and how many to verify, so that a round brings the most per millisecond.

In each round the engine asks `limits` before drafting and `choose` once the drafts have come, and
reports to `observe` how it went. The controller has no clock and no randomness of its own: the same
rounds give the same answers. What it decides costs or saves time and cannot change a token.

It drafts only where that is expected to bring more than a plain round (`planning`). Expectations
may be wrong, so:
- it switches on at one margin and off at a smaller one, and does not flap between;
- a new drafter has a warm-up of a few rounds with few drafts, to measure its times;
- seldom, while off it probes a few sequences (`probing`), while on it makes a plain round, and one
  with drafts of another length than seems best;
- a profit tracker compares what speculative rounds brought with what plain ones would have. Where
  that falls behind, whatever the expectation says, it is off for a while (`profit_tracker`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tinkercloud.speculative.draft_length.planning import Estimates, Planner, PlannerSettings
from tinkercloud.speculative.draft_length.probing import ProbeSchedule, Probing
from tinkercloud.speculative.draft_length.profit_tracker import ProfitTracker
from tinkercloud.speculative.draft_length.rounds import Kind, Load, Reason, Round

FIRST_COMPARISON = 4  # speculative rounds before the first plain one; then twice as many each time
FREE_PATIENCE = 4


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """switch_off: the gain over plain below which it stops; it starts at bounds.worthwhile.
    compare_every, vary_every: rounds from one plain round to the next while on, less at first, and
    from one with other lengths. first: sequences and tokens of a new drafter's rounds."""

    bounds: PlannerSettings = field(default_factory=PlannerSettings)
    switch_off: float = 0.02
    compare_every: int = 128
    vary_every: int = 32
    first: tuple[tuple[int, int], ...] = ((1, 1), (8, 2), (1, 8), (8, 1))
    probe: ProbeSchedule = field(default_factory=ProbeSchedule)
    probe_tokens: int = 2
    probe_sequences: int = 8


class DraftLengthController:
    """Of one drafter; `kind` and `reason` are those of the last round."""

    def __init__(self, knowledge: Estimates, settings: ControllerSettings | None = None) -> None:
        self._known = knowledge
        self._settings = settings or ControllerSettings()
        self._planner = Planner(knowledge, self._settings.bounds)
        self._probing = Probing(self._settings.probe)
        self._profit = ProfitTracker()
        self._loads: tuple[Load, ...] = ()
        self._asked: tuple[int, ...] = ()
        self._stopped = Reason.NONE
        self._pays = False
        self._since_compared = 0
        self._next_comparison = FIRST_COMPARISON
        self._next_probed = 0
        self._free = False
        self.kind = Kind.PLAIN
        self.reason = Reason.NONE

    @property
    def is_on(self) -> bool:
        return self._pays and not self._stopped

    def stop(self, reason: Reason) -> None:
        """No drafts until `resume`."""
        self._stopped = reason
        self._pays = False

    def resume(self) -> None:
        self._stopped = Reason.NONE
        self.renew()

    def renew(self) -> None:
        """New weights, or a new draft: what was counted is worth less, and is tried again soon."""
        self._known.acceptance.age(0.25)
        self._probing.hurry()
        self._profit.forgive()
        self._planner.forget()

    # ---- before drafting

    def limits(self, loads: Sequence[Load]) -> list[int]:
        """Tokens to ask the drafter for, at most, of each sequence; 0: not to ask."""
        self._loads = tuple(loads)
        self.kind, self.reason = self._decided()
        if self.kind is Kind.SPECULATIVE:
            # Where asking is free, how sure the drafter is decides later, not what it was on
            # average.
            self._free = self._planner.is_free
            self._asked = self._planner.everybody() if self._free else self._planner.plan.counts
        elif self.kind is Kind.PROBE:
            self._asked = self._few(self._settings.probe_sequences, self._settings.probe_tokens)
        elif self.kind is Kind.FIRST:
            self._asked = self._few(*self._settings.first[self._known.drafting.num_rounds])
        else:
            self._asked = (0,) * len(loads)
        return list(self._asked)

    def _decided(self) -> tuple[Kind, Reason]:
        if self._stopped:
            return Kind.PLAIN, self._stopped
        if not any(load.speculates for load in self._loads):
            return Kind.PLAIN, Reason.UNWANTED
        self._planner.face(self._loads)
        self._switch()
        if self._is_new:
            return Kind.FIRST, Reason.NONE
        if self._pays and self._since_compared >= self._rounds_to_compare:
            return Kind.COMPARISON, Reason.COMPARING
        if not self._pays and self._probing.due(self._probe_loss_ms()):
            return Kind.PROBE, Reason.NONE
        if self._pays or (self._planner.is_free and not self._profit.bars):
            return Kind.SPECULATIVE, Reason.NONE
        return Kind.PLAIN, self._why()

    @property
    def _rounds_to_compare(self) -> int:
        """From one plain round to the next; more where drafts cost nothing, and only their tokens'
        rows may be dearer than they seem."""
        return self._next_comparison * (FREE_PATIENCE if self._planner.is_free else 1)

    @property
    def _is_new(self) -> bool:
        """The drafter's times are wanted, and the first of them was neither too slow nor
        negligible."""
        seen = self._known.drafting.num_rounds
        if seen and self._planner.is_free:
            return False
        too_slow = self._planner.drafting_ms(1, 1) > self._planner.plain_ms()
        return seen < len(self._settings.first) and not too_slow and self._planner.room > 0

    def _switch(self) -> None:
        self._pays = not self._profit.bars and self._planner.plan.gain > self._margin

    @property
    def _margin(self) -> float:
        """The gain that is asked for: less once it is on."""
        settings = self._settings
        return settings.switch_off if self._pays else settings.bounds.worthwhile

    def _why(self) -> Reason:
        return Reason.BEHIND if self._profit.bars else self._planner.why

    # ---- once the drafts have come

    def choose(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        """How many tokens of each draft to verify; of the sequences of the last `limits`."""
        assert len(confidences) == len(self._loads), "drafts of other sequences"
        lengths = [min(len(c), n) for c, n in zip(confidences, self._asked, strict=True)]
        if not any(lengths):
            self.reason = self.reason or Reason.EMPTY
            return lengths
        if self.kind in (Kind.PROBE, Kind.FIRST):
            return lengths
        found = self._planner.chosen(confidences, lengths)
        if found.gain > self._margin:
            return self._varied(found.counts, lengths)
        too_many = self._planner.why is Reason.TOO_MANY
        self.reason = Reason.TOO_MANY if too_many else Reason.ACCEPTANCE
        return [0] * len(lengths)

    def _varied(self, counts: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Now and then a token more of each, or one less: what was measured too slow would never be
        seen again."""
        turn, rest = divmod(self._since_compared, self._settings.vary_every)
        if rest != self._settings.vary_every - 1:
            return list(counts)
        more = 1 if turn % 2 else -1
        varied = [
            min(max(n + more, 1), most) if n else 0 for n, most in zip(counts, lengths, strict=True)
        ]
        return varied if sum(varied) <= self._planner.room else list(counts)

    # ---- while off, or new

    def _few(self, sequences: int, tokens: int) -> tuple[int, ...]:
        """So many tokens for so many sequences at most, others each time."""
        willing = [i for i, load in enumerate(self._loads) if load.speculates]
        tokens = max(1, min(tokens, self._settings.bounds.max_tokens, self._planner.room))
        many = min(sequences, len(willing), self._planner.room // tokens)
        first = self._next_probed % len(willing)
        self._next_probed = first + many
        chosen = set((willing[first:] + willing[:first])[:many])
        return tuple(tokens if i in chosen else 0 for i in range(len(self._loads)))

    def _probe_loss_ms(self) -> float:
        settings = self._settings
        tokens = settings.probe_tokens * min(settings.probe_sequences, len(self._loads))
        return self._planner.probe_loss_ms(tokens, settings.probe_tokens)

    # ---- after the round

    def observe(self, told: Round) -> None:
        """The round of the last `limits` is over."""
        times = told.times
        plain_ms = self._known.costs.plain_ms(told.num_sequences, told.context)
        worth_ms = plain_ms * told.num_emitted / told.num_sequences
        self._learn(told)
        self._probing.passed(times.all_ms)
        self._profit.passed()
        if self.kind is not Kind.SPECULATIVE and self.kind is not Kind.PLAIN:
            self._planner.forget()  # made to learn from
        if self.kind is Kind.PROBE:
            # One that broke even was well.
            well = told.num_verified > 0 and worth_ms >= times.all_ms
            self._probing.told(well=well, loss_ms=times.all_ms - worth_ms)
            self._profit.probed(well=well)
        elif self.kind is Kind.COMPARISON:
            self._since_compared = 0
            most = self._settings.compare_every
            self._next_comparison = min(2 * self._next_comparison, most)
        elif self.kind is Kind.SPECULATIVE:
            self._since_compared += 1
            if times.usable and (told.num_verified or not self._free):
                self._profit.add(worth_ms, times.all_ms)

    def _learn(self, told: Round) -> None:
        known, times = self._known, told.times
        slower = known.costs.pace
        if times.usable:
            shape = told.num_rows, told.num_sequences, told.context
            slower = known.costs.observe(*shape, times.target_ms)
        steps = max(told.asked, default=0)
        known.drafting.observe(sum(told.asked), steps, times.draft_ms / slower)
        if any(told.asked):
            known.acceptance.learn(told)
