"""What an operator sees of a proxy: its metrics, and its status."""

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from tinkercloud.proxy.service import ProxyService

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_TOKENS = "tinkercloud_proxy_tokens"


class _ProxyCollector(Collector):
    def __init__(self, service: ProxyService):
        self._service = service

    def collect(self) -> Iterator[Metric]:
        counts = self._service.counts
        requests = CounterMetricFamily(
            "tinkercloud_proxy_requests", "begun, by how they are answered", labels=["way"]
        )
        requests.add_metric(["speculated"], counts.speculated)
        requests.add_metric(["passed_on"], counts.passed_on.total())
        yield requests
        failed = "requests that an error or a refusal of the target ended"
        yield CounterMetricFamily("tinkercloud_proxy_failures", failed, value=counts.failed)
        running = "requests underway"
        yield GaugeMetricFamily("tinkercloud_proxy_running", running, value=counts.running)
        speculation = self._service.speculation
        yield GaugeMetricFamily(
            "tinkercloud_proxy_speculates", "1: drafts are verified", value=speculation is not None
        )
        tokens = CounterMetricFamily(_TOKENS, "drafted and sampled, by kind", labels=["kind"])
        tokens.add_metric(["passed_on"], counts.passed_tokens)
        if speculation is None:
            yield tokens
            return
        speculator = speculation.speculator
        for kind in ("drafted", "accepted", "verified", "plain"):
            tokens.add_metric([kind], getattr(speculator.counts, kind))
        yield tokens
        rounds = "drafts that were verified"
        yield CounterMetricFamily(
            "tinkercloud_proxy_rounds", rounds, value=speculator.counts.rounds
        )
        drafts = CounterMetricFamily(
            "tinkercloud_proxy_drafts", "of each drafter", labels=["drafter", "outcome"]
        )
        for entry in speculator.drafters.entries:
            drafts.add_metric([entry.source.name, "asked"], entry.num_asked)
            drafts.add_metric([entry.source.name, "taken"], entry.num_taken)
            drafts.add_metric([entry.source.name, "failed"], entry.num_failed)
        yield drafts


def exposition(service: ProxyService) -> bytes:
    """In Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_ProxyCollector(service))
    return generate_latest(registry)


def status_json(service: ProxyService) -> dict[str, Any]:
    """What the dashboard shows."""
    counts = service.counts
    status: dict[str, Any] = {
        "uptime_s": service.uptime_s,
        "target": _target_json(service),
        "requests": {
            "running": counts.running,
            "speculated": counts.speculated,
            "passed_on": dict(counts.passed_on),
            "failed": counts.failed,
            "passed_tokens": counts.passed_tokens,
        },
    }
    if service.speculation is None:
        return status | {"speculation": None, "passes_on": service.passes_on}
    speculator = service.speculation.speculator
    totals = speculator.counts
    return status | {
        "speculation": {
            "verified_by": speculator.target.kind.name,
            "several": speculator.drafters.together,
            "rounds": totals.rounds,
            "drafted": totals.drafted,
            "accepted": totals.accepted,
            "verified": totals.verified,
            "acceptance": totals.accepted / totals.drafted if totals.drafted else None,
            "tokens_a_round": totals.verified / totals.rounds if totals.rounds else None,
            "plain": totals.plain,
        },
        "drafters": [
            {
                "name": entry.source.name,
                "up": not entry.down_until,
                "trouble": entry.trouble,
                "asked": entry.num_asked,
                "taken": entry.num_taken,
                "failed": entry.num_failed,
            }
            for entry in speculator.drafters.entries
        ],
    }


def _target_json(service: ProxyService) -> dict[str, Any]:
    """answered_s: seconds since its last answer."""
    upstream = service.upstream
    at = upstream.answered_at
    return {
        "url": upstream.name,
        "model": service.target.model,
        "up": not upstream.trouble,
        "trouble": upstream.trouble,
        "answered_s": None if at is None else time.monotonic() - at,
    }
