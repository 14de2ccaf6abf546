"""Snapshots that services and backends keep anyway, as metrics.

A name that ends in `_total` is a counter, any other a gauge. What a backend has for each of its
pools ("NAME: key") is one metric with the label `pool`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

Stats = Mapping[str, float | int | str]
Lines = Callable[[], list[str]]
Tokens = Callable[[], Sequence[tuple[tuple[str, str, str], int]]]

HELP = {
    "requests_pending": "Requests that are acknowledged and have no outcome.",
    "on_policy_tokens": "Trained tokens that the present weights had sampled.",
    "on_policy_ratio_deviation_max": "Largest |ratio - 1| of trainer to sampler on-policy.",
    "on_policy_logprob_deviation_mean": "Mean |trainer - sampler| of log-probabilities, in nats.",
    "replay_debt_seconds": "Seconds of computing that a crash now would cost.",
    "replay_deviation_nats": "Largest difference of a log-probability computed again.",
    "recoveries_total": "Models brought back after an end of the engine or the server.",
    "snapshots": "Snapshots taken since the start.",
    "snapshot_bytes": "Bytes written by snapshots since the start.",
    "snapshot_seconds": "Seconds that snapshots took since the start.",
    "models_put_away_total": "Idle models that went to the disk.",
    "sessions_expired_total": "Sessions that ended for want of heartbeats.",
    "engine_alive": "1 where the engine process lives.",
    "engine_restarts": "Times that the engine process was started again.",
    "engine_memory_bytes": "Resident memory of the engine process.",
    "sampling_memory_bytes": "The engine's resident memory at its highest while it sampled.",
    "training_memory_bytes": "The engine's resident memory at its highest while it trained.",
    "device_memory_bytes": "Memory that tensors take on the accelerator.",
    "sampling_running": "Sequences that are decoded together.",
    "sampling_waiting": "Samples that wait for a place.",
    "sampling_preempted": "Sequences that gave their blocks to older ones, since the start.",
    "training_waiting": "Training operations in the engine.",
    "tokens_sampled": "Tokens drawn by the engine since its start.",
    "kv_blocks": "Blocks for keys and values.",
    "kv_blocks_held": "Blocks that running samples hold.",
    "models": "Models in memory.",
    "versions": "Published versions of weights.",
    "versions_on_disk": "Published versions that wait on disk.",
    "phase_ms": "Milliseconds spent on moving GPUs between phases, since the start.",
    "phase_moves": "Moves of GPUs between training and sampling.",
    "phase_waiting": "Operations that wait for the GPUs' other phase.",
}


class StatsCollector(Collector):
    def __init__(self, stats: Callable[[], Stats]):
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for name, value in self._stats().items():
            if isinstance(value, int | float):
                pool, _, key = name.rpartition(": ")
                if key not in families:
                    families[key] = _family(key, ("pool",) if pool else ())
                families[key].add_metric((pool,) if pool else (), value)
        yield from families.values()


def _family(key: str, labels: tuple[str, ...]) -> GaugeMetricFamily | CounterMetricFamily:
    name = "tinkercloud_" + re.sub(r"[^a-zA-Z0-9_]+", "_", key)
    text = HELP.get(key, f"{key.replace('_', ' ').capitalize()}.")
    kind = CounterMetricFamily if key.endswith("_total") else GaugeMetricFamily
    return kind(name, text, labels=labels)


class LinesCollector(Collector):
    """What another process sends in Prometheus' text format."""

    def __init__(self, lines: Lines):
        self._lines = lines

    def collect(self) -> Iterator[Metric]:
        yield from text_string_to_metric_families("\n".join([*self._lines(), ""]))


class TokensCollector(Collector):
    """tokens: by user, base model and kind, since the start."""

    def __init__(self, tokens: Tokens):
        self._tokens = tokens

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "tinkercloud_tokens",
            "Tokens of requests that succeeded: training, prefill, cached_prefill or sample.",
            labels=("user", "base_model", "kind"),
        )
        for labels, count in self._tokens():
            family.add_metric(labels, count)
        yield family
