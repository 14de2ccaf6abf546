"""What speculation does, for those who watch: counts, times, and an alarm. It decides nothing.

`snapshot` is for JSON, `lines` for Prometheus.
"""

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from math import isnan
from typing import Any

from tinkercloud.speculative.draft_length.rounds import Kind, Reason, Round
from tinkercloud.speculative.observability.calibration import Calibration
from tinkercloud.speculative.observability.prometheus import exposed

TOKEN_MEMORY = 0.998  # of the running acceptance, per token
ROUND_MEMORY = 0.99  # of goodput, per round

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RoundReport:
    """chances: of each sequence's judged tokens, as `calibration` wants them, NaN where it is not
    known; () where nothing was audited. version_lag: versions that the drafter is behind."""

    drafter: str
    kind: Kind
    reason: Reason
    round: Round
    chances: tuple[tuple[float, ...], ...] = ()
    version_lag: int = 0


@dataclass(slots=True)
class Depth:
    """expected: of the `audited` ones, how many should have stood; `stood` of them did."""

    proposed: int = 0
    verified: int = 0
    accepted: int = 0
    audited: int = 0
    expected: float = 0.0
    stood: int = 0


@dataclass(slots=True)
class DrafterRecord:
    depths: list[Depth] = field(default_factory=list)
    calibration: Calibration = field(default_factory=Calibration)
    acceptance: float | None = None  # running mean; of tokens, given that those before stood
    version_lag: int = 0
    alarmed: bool = False

    def depth(self, index: int) -> Depth:
        while len(self.depths) <= index:
            self.depths.append(Depth())
        return self.depths[index]

    def judge(self, index: int, *, stands: bool) -> None:
        self.depth(index).accepted += stands
        known = self.acceptance if self.acceptance is not None else float(stands)
        self.acceptance = TOKEN_MEMORY * known + (1.0 - TOKEN_MEMORY) * stands

    def audit(self, index: int, *, stands: bool, chance: float) -> None:
        depth = self.depth(index)
        depth.audited += 1
        depth.expected += chance
        depth.stood += stands
        self.calibration.add(stands, chance)

    def snapshot(self) -> Json:
        calibration = self.calibration
        return {
            "depths": [asdict(depth) for depth in self.depths],
            "acceptance": self.acceptance,
            "version_lag": self.version_lag,
            "calibration_z": calibration.z,
            "calibration_tokens": calibration.num_tokens,
            "alarmed": self.alarmed,
        }


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
        self._drafters: dict[str, DrafterRecord] = {}
        self._kinds: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._drafted: Counter[int] = Counter()
        self._totals: Counter[str] = Counter()
        self._ms: defaultdict[str, float] = defaultdict(float)
        self._goodput: dict[int, Goodput] = {}

    def record(self, report: RoundReport) -> bool:
        """A round is over. True where the drafter's calibration raises the alarm, once."""
        told = report.round
        self._kinds[report.kind] += 1
        if report.reason:
            self._reasons[report.reason] += 1
        self._drafted.update(told.verified)
        self._count(told)
        self._time(report.kind, told)
        return self._judge(report)

    def alarmed(self, drafter: str) -> bool:
        return drafter in self._drafters and self._drafters[drafter].alarmed

    def clear(self, drafter: str) -> None:
        """The alarm is over, and its window."""
        record = self._drafters.setdefault(drafter, DrafterRecord())
        record.alarmed = False
        record.calibration = Calibration()

    def _count(self, told: Round) -> None:
        self._totals["forwards"] += 1
        self._totals["sequences"] += told.num_sequences
        self._totals["tokens"] += told.num_emitted
        self._totals["rows"] += told.num_rows
        self._totals["rows_wasted"] += told.num_rows - told.num_emitted

    def _time(self, kind: Kind, told: Round) -> None:
        times = told.times
        for name, ms in (
            ("draft", times.draft_ms),
            ("verify", times.verify_ms),
            ("host", times.host_ms),
        ):
            self._ms[name] += ms
        if times.usable and kind not in (Kind.PROBE, Kind.FIRST):
            # Plain and speculative compare among loads of like size only.
            alike = self._goodput.setdefault(told.num_sequences.bit_length(), Goodput())
            name = "speculative" if kind is Kind.SPECULATIVE else "plain"
            alike.add(name, told.num_emitted, times.all_ms)

    def _judge(self, report: RoundReport) -> bool:
        record = self._drafters.setdefault(report.drafter, DrafterRecord())
        record.version_lag = report.version_lag
        told = report.round
        chances = report.chances or ((),) * told.num_sequences
        judged = told.num_judged
        for i, confidences in enumerate(told.confidences):
            for depth in range(len(confidences)):
                record.depth(depth).proposed += 1
                record.depth(depth).verified += depth < told.verified[i]
            for depth in range(judged[i]):
                record.judge(depth, stands=depth < told.accepted[i])
            for depth, chance in enumerate(chances[i][: judged[i]]):
                if not isnan(chance):
                    record.audit(depth, stands=depth < told.accepted[i], chance=chance)
        raised = record.calibration.alarms and not record.alarmed
        record.alarmed = record.alarmed or raised
        return raised

    def snapshot(self) -> Json:
        """Counts since the start, acceptance, goodput and calibration of late; for JSON."""
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
            "rows": {
                "used": totals["rows"] - totals["rows_wasted"],
                "wasted": totals["rows_wasted"],
            },
            "ms": {name: self._ms[name] for name in ("draft", "verify", "host")},
            "goodput": {
                f"{1 << bits >> 1}-{(1 << bits) - 1}": goodput.snapshot()
                for bits, goodput in sorted(self._goodput.items())
            },
        }

    def lines(self) -> list[str]:
        """The snapshot in Prometheus' text format."""
        return exposed(self.snapshot())
