"""Readings of a server's `/metrics`, and what happened between two of them."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Reading:
    """taken_s: on a clock that only advances. samples: by name."""

    taken_s: float
    samples: Mapping[str, tuple[tuple[Labels, float], ...]]

    @classmethod
    def of(cls, text: str, taken_s: float) -> "Reading":
        from prometheus_client.parser import text_string_to_metric_families

        samples: defaultdict[str, list[tuple[Labels, float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name].append((sample.labels, sample.value))
        return cls(taken_s, {name: tuple(values) for name, values in samples.items()})

    def value(self, name: str) -> float | None:
        """The sum of all samples of a name; None: the server has none."""
        values = [value for _, value in self.samples.get(name, ())]
        return sum(values) if values else None

    def by(self, name: str, *labels: str, **where: str) -> dict[tuple[str, ...], float]:
        """Sums by these labels, of the samples that have others as `where` says."""
        sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for sample_labels, value in self.samples.get(name, ()):
            if all(sample_labels.get(label) == text for label, text in where.items()):
                sums[tuple(sample_labels.get(label, "") for label in labels)] += value
        return dict(sums)


@dataclass(frozen=True, slots=True)
class Interval:
    """Two readings of one server. A counter that is smaller than before began anew."""

    before: Reading
    after: Reading

    @property
    def length_s(self) -> float:
        return max(self.after.taken_s - self.before.taken_s, 1e-9)

    def rates(self, name: str, *labels: str, **where: str) -> dict[tuple[str, ...], float]:
        """Increase per second, by these labels."""
        earlier = self.before.by(name, *labels, **where)
        return {
            key: (value - earlier.get(key, 0.0) if value >= earlier.get(key, 0.0) else value)
            / self.length_s
            for key, value in self.after.by(name, *labels, **where).items()
        }

    def rate(self, name: str) -> float | None:
        """Of a metric without labels; None: the server has none."""
        return self.rates(name).get(())

    def quantile(self, share: float, name: str, **where: str) -> float | None:
        """Of a histogram's observations in this interval, linear within a bucket; None: there were
        none. What lies above the last bound is that bound."""
        buckets = sorted(self._buckets(name, where))
        total = buckets[-1][1] if buckets else 0.0
        if not total:
            return None
        low, below = 0.0, 0.0
        for bound, count in buckets:
            if count >= share * total:
                if math.isinf(bound):
                    return low
                return low + (bound - low) * (share * total - below) / (count - below)
            low, below = bound, count
        return low

    def _buckets(self, name: str, where: Labels) -> Iterator[tuple[float, float]]:
        for (bound,), rate in self.rates(f"{name}_bucket", "le", **where).items():
            yield float(bound), rate * self.length_s
