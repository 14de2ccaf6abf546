"""What stands for the other machine: two draft workers behind networks of any delay.

The process reads a line of JSON (`Job`) and writes one with the ports: of each kind of worker, by
round trip. When its input ends it writes what the drafters computed.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tinkercloud.addresses import Address, read_key
from tinkercloud.commands.pipeline import namespace
from tinkercloud.commands.pipeline.delay_relay import DelayRelay
from tinkercloud.commands.pipeline.scripted_drafter import Script, ScriptedDrafter
from tinkercloud.commands.pipeline.spans import Span
from tinkercloud.errors import ConfigError
from tinkercloud.speculative.remote.connection import ServerSecurity
from tinkercloud.speculative.remote.methods import DRAFT
from tinkercloud.speculative.remote.service import WorkerServer
from tinkercloud.speculative.remote.worker import DraftWorker, WorkerLimits

SERIAL, OVERLAPPED = "serial", "overlapped"


@dataclass(frozen=True)
class Job:
    """key_file: with the key that the workers ask for. loss: None where relays delay; else the
    share of packets that are lost on the way to a network namespace and back, behind a link of the
    one round trip."""

    script: Script
    round_trips_ms: Sequence[float]
    key_file: str
    loss: float | None = None


@dataclass
class WorkerProcess:
    """ports: of each kind of worker, in the order of the round trips. spans: of each kind, when the
    process has ended."""

    host: str
    ports: Mapping[str, Sequence[int]]
    spans: dict[str, list[Span]] = field(default_factory=dict)


@contextmanager
def worker_process(job: Job) -> Iterator[WorkerProcess]:
    command = [sys.executable, "-m", "tinkercloud.commands.pipeline.worker_process"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps(asdict(job)), file=process.stdin, flush=True)
        line = process.stdout.readline()
        if not line:
            raise ConfigError("the draft worker's process has ended, see above")
        worker = WorkerProcess(**json.loads(line))
        yield worker
        process.stdin.close()
        report = json.loads(process.stdout.readline())
    worker.spans = {kind: [Span(*each) for each in spans] for kind, spans in report.items()}


def main() -> None:
    job = json.loads(sys.stdin.readline())
    script, loss = Script(**job["script"]), job["loss"]
    host, round_trips_ms = "127.0.0.1", job["round_trips_ms"]
    if loss is not None:
        (ms,) = round_trips_ms
        host = namespace.enter(ms / 2000, loss)
    security = ServerSecurity(read_key(Path(job["key_file"])))
    drafters = {kind: ScriptedDrafter(script) for kind in (SERIAL, OVERLAPPED)}
    servers, ports = [], {}
    for kind, drafter in drafters.items():
        limits = WorkerLimits() if kind == OVERLAPPED else WorkerLimits(num_outcomes=0)
        worker = DraftWorker(lambda _, drafter=drafter: drafter, limits)
        servers.append(WorkerServer.start(worker, DRAFT, Address(host, 0), security))
        port = servers[-1].port
        relayed = [] if loss is not None else round_trips_ms
        ports[kind] = [DelayRelay(port, ms / 2000).port for ms in relayed] or [port]
    sys.stdout.write(json.dumps({"host": host, "ports": ports}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    for server in servers:
        server.stop()
    spans = {
        kind: [(each.name, each.start_s, each.end_s) for each in drafter.spans]
        for kind, drafter in drafters.items()
    }
    sys.stdout.write(json.dumps(spans) + "\n")


if __name__ == "__main__":
    main()
