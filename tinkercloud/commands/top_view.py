"""What `tinkercloud top` shows of an interval."""

import time
from collections.abc import Iterator

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tinkercloud.commands.metric_readings import Interval

ENDED = "tinkercloud_operations_total"
PHASES = "tinkercloud_operation_phase_seconds"
QUEUE = "tinkercloud_queue_operations"
UNKNOWN = "-"


def view(url: str, interval: Interval) -> RenderableType:
    facts = Columns([_engine(interval), _recovery(interval)], padding=(0, 4))
    return Group(_head(url, interval), "", _operations(interval), "", _users(interval), "", facts)


def _head(url: str, interval: Interval) -> Text:
    after = interval.after
    started = after.value("process_start_time_seconds")
    up = UNKNOWN if started is None else _duration(time.time() - started)
    pending = after.value("tinkercloud_requests_pending") or 0
    text = Text.assemble((f"tinkercloud {url}", "bold"), f"   up {up}   {pending:g} pending")
    if after.value("tinkercloud_engine_alive") == 0:
        text.append("   the engine is not there", "bold red")
    return text


def _operations(interval: Interval) -> Table:
    table = _table("operations", "waiting", "running", "longest wait", "per s", "failed per s")
    for name in ("wait p50", "p99", "run p50", "p99"):
        table.add_column(name, justify="right", no_wrap=True)
    depth = interval.after.by(QUEUE, "kind", "phase")
    oldest = interval.after.by("tinkercloud_queue_oldest_seconds", "kind")
    rates = interval.rates(ENDED, "kind")
    failed = interval.rates(ENDED, "kind", outcome="failed_server")
    for kind in sorted({kind for kind, _ in depth} | {kind for (kind,) in rates}):
        table.add_row(
            kind,
            *(f"{depth.get((kind, phase), 0):g}" for phase in ("waiting", "running")),
            _duration(oldest.get((kind,))),
            f"{rates.get((kind,), 0):.1f}",
            f"{failed.get((kind,), 0):.1f}",
            *_quantiles(interval, kind),
        )
    return table


def _quantiles(interval: Interval, kind: str) -> Iterator[str]:
    for phase in ("waiting", "running"):
        for share in (0.5, 0.99):
            yield _duration(interval.quantile(share, PHASES, kind=kind, phase=phase))


def _users(interval: Interval) -> Table:
    table = _table("user", "operations per s", "tokens trained per s", "prefilled", "sampled")
    rates = interval.rates(ENDED, "user")
    tokens = interval.rates("tinkercloud_tokens_total", "user", "kind")
    for user in sorted({user for (user,) in rates} | {user for user, _ in tokens}):
        table.add_row(
            user,
            f"{rates.get((user,), 0):.1f}",
            *(f"{tokens.get((user, k), 0):,.0f}" for k in ("training", "prefill", "sample")),
        )
    return table


def _engine(interval: Interval) -> Table:
    after = interval.after
    held, blocks = after.value("tinkercloud_kv_blocks_held"), after.value("tinkercloud_kv_blocks")
    tokens = interval.rate("tinkercloud_speculation_tokens_total")
    forwards = interval.rate("tinkercloud_speculation_forwards_total")
    return _facts(
        "engine",
        {
            "sequences running": _number(after.value("tinkercloud_sampling_running")),
            "sequences waiting": _number(after.value("tinkercloud_sampling_waiting")),
            "keys and values in use": _share(held, blocks),
            "models": _number(
                after.value("tinkercloud_models") or after.value("tinkercloud_num_models")
            ),
            "memory, API process": _size(after.value("process_resident_memory_bytes")),
            "memory, engine": _size(after.value("tinkercloud_engine_memory_bytes")),
            "highest, sampling": _size(after.value("tinkercloud_sampling_memory_bytes")),
            "highest, training": _size(after.value("tinkercloud_training_memory_bytes")),
            "tokens per forward pass": f"{tokens / forwards:.2f}"
            if tokens and forwards
            else UNKNOWN,
        },
    )


def _recovery(interval: Interval) -> Table:
    after = interval.after
    ratio = after.value("tinkercloud_on_policy_ratio_deviation_max")
    return _facts(
        "recovery and numerics",
        {
            "replay debt": _duration(after.value("tinkercloud_replay_debt_seconds")),
            "models brought back": _number(after.value("tinkercloud_recoveries_total")),
            "engine restarts": _number(after.value("tinkercloud_engine_restarts")),
            "largest |ratio - 1| on-policy": UNKNOWN if ratio is None else f"{ratio:.2g}",
        },
    )


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _facts(title: str, facts: dict[str, str]) -> Table:
    table = _table(title, "")
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f}"


def _share(part: float | None, whole: float | None) -> str:
    return UNKNOWN if part is None or not whole else f"{part / whole:.1%}"


def _size(num_bytes: float | None) -> str:
    if num_bytes is None:
        return UNKNOWN
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    if seconds < 1:
        return f"{1000 * seconds:.{1 if seconds < 0.01 else 0}f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 120 else f"{minutes} min"
