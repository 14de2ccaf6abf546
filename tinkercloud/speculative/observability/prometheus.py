"""A telemetry snapshot in Prometheus' text format, version 0.0.4. Names carry base units."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "tinkercloud_speculation_"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric; samples: its labels and their values."""

    name: str
    kind: str  # counter or gauge
    help: str
    samples: tuple[tuple[Mapping[str, str], float], ...]

    def lines(self) -> Iterator[str]:
        yield f"# HELP {PREFIX}{self.name} {self.help}"
        yield f"# TYPE {PREFIX}{self.name} {self.kind}"
        for labels, value in self.samples:
            pairs = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
            yield f"{PREFIX}{self.name}{'{' + pairs + '}' if pairs else ''} {float(value)!r}"


def exposed(snapshot: Mapping[str, Any]) -> list[str]:
    """The lines of a `Telemetry.snapshot`; a metric without a value yet has none."""
    families = (*_totals(snapshot), *_by_drafter(snapshot["drafters"]), *_by_load(snapshot))
    return [line for family in families if family.samples for line in family.lines()]


def following_lines(snapshot: Mapping[str, Any]) -> list[str]:
    """What it takes to keep a draft up with its policy, of an `OnlineTrainer.snapshot`; none where
    no draft is trained."""
    families = [
        Family(name, "counter", help_text, tuple(({label: k}, v) for k, v in values.items()))
        for name, label, help_text, values in (
            ("following_seconds_total", "part", "Beside rounds.", snapshot.get("seconds", {})),
            ("trainings_total", "outcome", "Of the draft.", snapshot.get("trainings", {})),
        )
    ]
    return [line for family in families if family.samples for line in family.lines()]


def remote_lines(snapshot: Mapping[str, Any]) -> list[str]:
    """Of a `RemoteDrafter.snapshot`; none where there are no workers."""
    workers = snapshot.get("workers", {})
    families = [
        Family("remote_total", "counter", "Of drafts by workers elsewhere, by what happened.",
               tuple(({"event": name}, n) for name, n in snapshot.get("counts", {}).items())),
        Family("remote_taken_total", "counter", "Drafts taken, by worker.",
               tuple(({"worker": name}, w["taken"]) for name, w in workers.items())),
        Family("remote_connected", "gauge", "1 where the worker is connected.",
               tuple(({"worker": name}, w["connected"]) for name, w in workers.items())),
    ]  # fmt: skip
    return [line for family in families if family.samples for line in family.lines()]


def _totals(snapshot: Mapping[str, Any]) -> Iterator[Family]:
    seconds = {part: ms / 1e3 for part, ms in snapshot["ms"].items()}
    for name, label, help_text, values in (
        ("rounds_total", "kind", "Rounds.", snapshot["rounds"]),
        ("off_rounds_total", "reason", "Rounds without drafts.", snapshot["off"]),
        ("drafted_total", "tokens", "Drafts verified, by length.", snapshot["drafted"]),
        ("rows_total", "use", "Rows of the target's forwards.", snapshot["rows"]),
        ("seconds_total", "part", "Time of rounds.", seconds),
    ):
        samples = tuple(({label: key}, value) for key, value in values.items())
        yield Family(name, "counter", help_text, samples)
    yield Family("forwards_total", "counter", "Forwards.", (({}, snapshot["forwards"]),))
    yield Family("tokens_total", "counter", "Tokens emitted.", (({}, snapshot["tokens"]),))


def _by_drafter(drafters: Mapping[str, Any]) -> Iterator[Family]:
    for name in ("proposed", "verified", "accepted", "audited", "expected"):
        samples = tuple(
            ({"drafter": drafter, "depth": str(i + 1)}, counts[name])
            for drafter, record in drafters.items()
            for i, counts in enumerate(record["depths"])
        )
        yield Family(f"tokens_{name}_total", "counter", f"Drafted tokens {name}.", samples)
    for name, help_text in (
        ("acceptance", "Share of judged tokens accepted recently."),
        ("version_lag", "Versions that the drafter is behind the policy."),
        ("calibration_z", "Deviations by which more tokens are accepted than expected."),
        ("alarmed", "1 where the calibration raised the alarm."),
    ):
        samples = tuple(
            ({"drafter": drafter}, record[name])
            for drafter, record in drafters.items()
            if record[name] is not None
        )
        yield Family(name, "gauge", help_text, samples)


def _by_load(snapshot: Mapping[str, Any]) -> Iterator[Family]:
    for name, key in (("goodput", "speculative_per_s"), ("goodput_plain", "plain_per_s")):
        samples = tuple(
            ({"sequences": sequences}, goodput[key])
            for sequences, goodput in snapshot["goodput"].items()
            if goodput[key] is not None
        )
        yield Family(f"{name}_tokens_per_second", "gauge", "Recent tokens per second.", samples)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
