"""What speculation does: counts, times, and an alarm. It decides nothing.

`snapshot` is for JSON, `lines` for Prometheus.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from math import isnan
from typing import Any

from tinkercloud.speculative.draft_length.rounds import Kind, Reason, Round
from tinkercloud.speculative.observability.calibration import Calibration
from tinkercloud.speculative.observability.prometheus import exposed

TOKEN_MEMORY = 0.998  # of the running acceptance, per token
ROUND_MEMORY = 0.99  # of goodput, per round

MOST_UNCOUNTED = 4
"""Rounds that are counted together: code that runs again at once takes a third of the time, while
the target's weights have every cache."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RoundReport:
    """chances: of each sequence's judged tokens, as `calibration` takes them, NaN where they are
    not known; () where nothing was audited. version_lag: policy steps since the draft was made."""

    drafter: str
    kind: Kind
    reason: Reason
    round: Round
    chances: tuple[tuple[float, ...], ...] = ()
    version_lag: int = 0


def _unaudited() -> dict[str, float]:
    return {"audited": 0, "expected": 0.0, "stood": 0}


@dataclass(slots=True)
class DrafterRecord:
    """proposed, verified, accepted: how many drafts had so many tokens of the kind. audits: by
    depth, of the tokens whose chance is known; expected: how many should have been accepted,
    `stood`: how many were. acceptance: running mean over judged tokens."""

    proposed: Counter[int] = field(default_factory=Counter[int])
    verified: Counter[int] = field(default_factory=Counter[int])
    accepted: Counter[int] = field(default_factory=Counter[int])
    audits: defaultdict[int, dict[str, float]] = field(
        default_factory=lambda: defaultdict(_unaudited)
    )
    calibration: Calibration = field(default_factory=Calibration)
    acceptance: float | None = None
    version_lag: int = 0
    alarmed: bool = False

    def add(self, report: RoundReport) -> None:
        self.version_lag = report.version_lag
        drafted = report.round
        chances = report.chances or ((),) * drafted.num_sequences
        for i, num_judged in enumerate(drafted.num_judged):
            accepted = drafted.accepted[i]
            self.proposed[len(drafted.confidences[i])] += 1
            self.verified[drafted.verified[i]] += 1
            self.accepted[accepted] += 1
            for depth in range(num_judged):
                self._judge(accepted=depth < accepted)
            for depth, chance in enumerate(chances[i][:num_judged]):
                if not isnan(chance):
                    self._audit(depth, chance, accepted=depth < accepted)

    def _judge(self, *, accepted: bool) -> None:
        mean = self.acceptance if self.acceptance is not None else float(accepted)
        self.acceptance = TOKEN_MEMORY * mean + (1.0 - TOKEN_MEMORY) * accepted

    def _audit(self, depth: int, chance: float, *, accepted: bool) -> None:
        counts = self.audits[depth]
        counts["audited"] += 1
        counts["expected"] += chance
        counts["stood"] += accepted
        self.calibration.add(accepted, chance)

    def _depths(self) -> list[Json]:
        """Counts of drafted tokens, by depth."""
        kinds = {"proposed": self.proposed, "verified": self.verified, "accepted": self.accepted}
        return [
            {name: _longer(sizes, depth) for name, sizes in kinds.items()}
            | self.audits.get(depth, _unaudited())
            for depth in range(max(self.proposed, default=0))
        ]

    def snapshot(self) -> Json:
        return {
            "depths": self._depths(),
            "acceptance": self.acceptance,
            "version_lag": self.version_lag,
            "calibration_z": self.calibration.z,
            "calibration_tokens": self.calibration.num_tokens,
            "alarmed": self.alarmed,
        }


def _longer(sizes: Counter[int], than: int) -> int:
    return sum(n for size, n in sizes.items() if size > than)


@dataclass(slots=True)
class Goodput:
    """Running sums, by kind of round."""

    tokens: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    ms: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, kind: str, tokens: float, ms: float) -> None:
        for sums, more in ((self.tokens, tokens), (self.ms, ms)):
            sums[kind] = ROUND_MEMORY * sums[kind] + more

    def per_s(self, kind: str) -> float | None:
        return 1e3 * self.tokens[kind] / self.ms[kind] if self.ms[kind] > 0 else None

    def snapshot(self) -> Json:
        fast, plain = self.per_s("speculative"), self.per_s("plain")
        speedup = fast / plain if fast and plain else None
        return {"speculative_per_s": fast, "plain_per_s": plain, "speedup": speedup}


class Telemetry:
    """Of one engine; called from the thread that runs its rounds."""

    def __init__(self) -> None:
        self._drafters: defaultdict[str, DrafterRecord] = defaultdict(DrafterRecord)
        self._kinds: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._drafted: Counter[int] = Counter()
        self._totals: Counter[str] = Counter()
        self._ms: defaultdict[str, float] = defaultdict(float)
        self._goodput: defaultdict[int, Goodput] = defaultdict(Goodput)
        self._uncounted: list[RoundReport] = []

    def record(self, report: RoundReport) -> None:
        """A round is over."""
        self._uncounted.append(report)
        if len(self._uncounted) >= MOST_UNCOUNTED:
            self._count_all()

    def is_alarmed(self, drafter: str) -> bool:
        """Whether its calibration has raised the alarm, by the rounds that are counted."""
        return self._drafters[drafter].alarmed

    def _count_all(self) -> None:
        reports, self._uncounted = self._uncounted, []
        for report in reports:
            self._count(report)

    def _count(self, report: RoundReport) -> None:
        self._kinds[report.kind] += 1
        if report.reason:
            self._reasons[report.reason] += 1
        self._drafted.update(report.round.verified)
        self._count_tokens(report.round)
        self._time(report.kind, report.round)
        record = self._drafters[report.drafter]
        record.add(report)
        record.alarmed = record.alarmed or record.calibration.alarms

    def _count_tokens(self, drafted: Round) -> None:
        self._totals["forwards"] += 1
        self._totals["sequences"] += drafted.num_sequences
        self._totals["tokens"] += drafted.num_emitted
        self._totals["rows"] += drafted.num_rows

    def _time(self, kind: Kind, drafted: Round) -> None:
        times = drafted.times
        self._ms["draft"] += times.draft_ms + times.catch_up_ms
        self._ms["verify"] += times.verify_ms
        self._ms["host"] += times.host_ms
        if times.usable and kind not in (Kind.PROBE, Kind.WARM_UP):
            # Plain and speculative rounds compare among loads of like size only.
            alike = self._goodput[drafted.num_sequences.bit_length()]
            name = "speculative" if kind is Kind.SPECULATIVE else "plain"
            alike.add(name, drafted.num_emitted, times.all_ms)

    def snapshot(self) -> Json:
        """Counts since the start; recent acceptance, goodput and calibration; for JSON."""
        self._count_all()
        totals = self._totals
        return {
            "drafters": {name: record.snapshot() for name, record in self._drafters.items()},
            "rounds": {kind.value: self._kinds[kind] for kind in Kind},
            "off": {reason.value: n for reason in Reason if (n := self._reasons[reason])},
            "drafted": {str(k): n for k, n in sorted(self._drafted.items())},
            "forwards": totals["forwards"],
            "tokens": totals["tokens"],
            "tokens_per_forward": totals["tokens"] / max(1, totals["forwards"]),
            "tokens_per_sequence_forward": totals["tokens"] / max(1, totals["sequences"]),
            "rows": {"used": totals["tokens"], "wasted": totals["rows"] - totals["tokens"]},
            "ms": {name: self._ms[name] for name in ("draft", "verify", "host")},
            "goodput": {
                f"{1 << bits >> 1}-{(1 << bits) - 1}": goodput.snapshot()
                for bits, goodput in sorted(self._goodput.items())
            },
        }

    def lines(self) -> list[str]:
        """The snapshot in Prometheus' text format."""
        return exposed(self.snapshot())
