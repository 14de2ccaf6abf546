"""Hundreds of clients of the official SDK at once: what fails, what is lost, what grows."""

import asyncio
import json
import os
import resource
import sqlite3
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass

from benchmarks.lib.bystander import SamplingBystander, Seen
from benchmarks.lib.footprint import Footprint, History, footprint, processor_s, watched
from benchmarks.lib.machine import ROOT
from benchmarks.lib.report import Cell, Target
from benchmarks.lib.sdk_clients import SAMPLING, TRAINING, Crowd, Work
from benchmarks.lib.server import Served
from benchmarks.lib.timing import quantile
from benchmarks.lib.tinker_http import PROTO, SDK_VERSION, text_prompt
from benchmarks.lib.wire_client import WireClient
from tests.serving import Server
from tinkercloud.storage.futures import SAMPLING_KIND
from tinkercloud.storage.journal import STEP_KIND
from tinkercloud.wire import codec

PLACES, PROMPT_TOKENS, MAX_TOKENS = range(8), 16, 8
MOST_POLL_MS = 100.0
MOST_GROWTH = 1.05
SETTLE_S = 3.0
COLUMNS = (
    *("who", "clients", "sent", "answered", "failed", "wrong"),
    *("p50 ms", "p99 ms", "per second"),
)


@dataclass(frozen=True)
class Load:
    sampling: int
    training: int
    processes: int
    seconds: float
    pace_s: float


@dataclass(frozen=True)
class Loaded:
    """What came of a load. before, after: the server without clients. on_record: samples that the
    server has completed for the clients, and steps. server_cores, client_cores: of which they had
    the time, on average."""

    load: Load
    work: Mapping[str, Work]
    bystander: Seen
    before: Footprint
    history: History
    after: Footprint
    on_record: Mapping[str, int]
    server_cores: float = 0.0
    client_cores: float = 0.0

    def rows(self) -> list[Sequence[Cell]]:
        counts = {SAMPLING: self.load.sampling, TRAINING: self.load.training}
        names = {SAMPLING: "sample", TRAINING: "forward_backward and optim_step"}
        rows = [self._row(f"SDK: {names[kind]}", counts[kind], self.work[kind]) for kind in counts]
        seen = self.bystander
        whole = Work(len(seen.whole_s) + len(seen.failures), 0, seen.whole_s, seen.failures)
        polls = Work(len(seen.poll_s), 0, seen.poll_s)
        rows.append(self._row("bystander: sample", 1, whole))
        rows.append(self._row("bystander: poll of a result", 1, polls))
        return rows

    def _row(self, who: str, clients: int, work: Work) -> Sequence[Cell]:
        answered = len(work.latencies_s)
        p50, p99 = (1e3 * quantile(work.latencies_s, share) for share in (0.5, 0.99))
        counts = (clients, work.sent, answered, len(work.failures), work.wrong)
        rate = round(answered / self.load.seconds, 1)
        return (who, *counts, round(p50, 2), round(p99, 2), rate)

    @property
    def failed(self) -> int:
        works = self.work.values()
        return len(self.bystander.failures) + sum(len(w.failures) + w.wrong for w in works)

    @property
    def lost(self) -> int:
        """Without an answer, or answered and not on record, or on record without an answer."""
        lost = 0
        for kind, work in self.work.items():
            lost += work.sent - len(work.latencies_s) - len(work.failures)
            lost += abs(self.on_record[kind] - len(work.latencies_s))
        return lost

    def targets(self) -> list[Target]:
        early, late = self.history.between(0.25, 0.5), self.history.between(0.75, 1.0)
        memory = late.memory_mb / early.memory_mb
        descriptors = late.descriptors / early.descriptors
        left = self.after.descriptors - self.before.descriptors
        return [
            Target.at_most("failed or wrong", self.failed, 0),
            Target.at_most("lost", self.lost, 0),
            Target.at_most("p99 of polls in ms", self.bystander.poll_ms(0.99), MOST_POLL_MS),
            Target.at_most("memory: last quarter by second quarter", memory, MOST_GROWTH, 3),
            Target.at_most("descriptors: the same", descriptors, MOST_GROWTH, 3),
            Target.at_most("descriptors that the clients leave open", left, 0),
        ]

    def about(self) -> str:
        early, late = self.history.between(0.25, 0.5), self.history.between(0.75, 1.0)
        return ABOUT.format(
            **asdict(self.load),
            before=self.before.memory_mb,
            early=early.memory_mb,
            late=late.memory_mb,
            after=self.after.memory_mb,
            open=late.descriptors,
            server_cores=self.server_cores,
            client_cores=self.client_cores,
        )


async def measure(server: Server, served: Served, load: Load) -> Loaded:
    assert server.process is not None
    pid, base_model = server.process.pid, served.base_model
    prompts = [[(31 * i + 7 * j) % 900 + 3 for j in range(PROMPT_TOKENS)] for i in PLACES]
    expected = await _expected(server, base_model, prompts)
    bystander = await SamplingBystander.connect(server.base_url, server.api_key, base_model)
    await bystander.ask()
    before, counted = footprint(pid), _on_record(server)
    crowds = [
        Crowd(*share, load.seconds, load.pace_s, base_model, prompts, expected, number)
        for number, share in enumerate(_shares(load))
    ]
    processes = await asyncio.gather(*(_start(server, crowd) for crowd in crowds))
    began, server_s = time.monotonic(), processor_s(pid)
    clients_s = _children_s() + sum(processor_s(each.pid) for each in processes)
    async with watched(pid) as points, bystander.watching() as seen:
        finished = await asyncio.gather(*(_finish(each) for each in processes))
    wall_s = time.monotonic() - began
    clients_s, server_s = _children_s() - clients_s, processor_s(pid) - server_s
    work = {SAMPLING: Work(), TRAINING: Work()}
    for each in finished:
        for kind, fields in each.items():
            work[kind].add(Work(**fields))
    work[TRAINING].wrong += _deviations(work[TRAINING].losses)
    on_record = {kind: n - counted[kind] for kind, n in _on_record(server).items()}
    on_record[SAMPLING] -= len(seen.whole_s)
    bystander.close()
    await asyncio.sleep(SETTLE_S)
    return Loaded(
        *(load, work, seen, before, History(points), footprint(pid), on_record),
        server_cores=server_s / wall_s,
        client_cores=clients_s / wall_s,
    )


def _children_s() -> float:
    """The processor's time of this process' children that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


def _shares(load: Load) -> list[tuple[int, int]]:
    """Of each process: sampling and training clients."""
    numbers = range(load.processes)
    return [
        (len(range(n, load.sampling, load.processes)), len(range(n, load.training, load.processes)))
        for n in numbers
    ]


async def _expected(
    server: Server, base_model: str, prompts: Sequence[Sequence[int]]
) -> list[list[int]]:
    """A sample of each prompt, the seed its place, of a server that does nothing else."""
    api = WireClient(server.base_url, server.api_key)
    session = await api.post("create_session", sdk_version=SDK_VERSION, tags=[], user_metadata={})
    samples = []
    for place, prompt in enumerate(prompts):
        submitted = await api.post(
            "asample",
            session_id=session["session_id"],
            base_model=base_model,
            num_samples=1,
            prompt=text_prompt(prompt),
            sampling_params={"max_tokens": MAX_TOKENS, "seed": place, "temperature": 1.0},
        )
        result = await api.retrieve(submitted["request_id"], PROTO)
        (sequence,) = codec.decode_sample_output(result.body).sequences
        samples.append([int(token) for token in sequence.tokens])
    api.close()
    return samples


async def _start(server: Server, crowd: Crowd) -> asyncio.subprocess.Process:
    """Returns when all its clients are connected."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.lib.sdk_clients", json.dumps(asdict(crowd))),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **server.sdk_environment},
        cwd=ROOT,
        limit=2**28,
    )
    assert process.stdout is not None
    line = await process.stdout.readline()
    assert line == b"ready\n", f"the clients did not connect: {line!r}"
    return process


async def _finish(process: asyncio.subprocess.Process) -> dict[str, dict[str, object]]:
    """Begin the load, and what its clients tell at its end."""
    out, _ = await process.communicate(b"go\n")
    assert process.returncode == 0, f"clients ended with {process.returncode}"
    return json.loads(out)


def _on_record(server: Server) -> dict[str, int]:
    """Samples that are completed, and steps."""
    uri = f"file:{server.data_dir / 'tinkercloud.db'}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as database:
        rows = database.execute(
            "SELECT kind, COUNT(*) FROM futures WHERE status = 'completed' GROUP BY kind"
        )
        counts = dict(rows.fetchall())
    return {SAMPLING: counts.get(SAMPLING_KIND, 0), TRAINING: counts.get(STEP_KIND, 0)}


def _deviations(losses: Sequence[Sequence[float]]) -> int:
    """Steps of models that were trained alike, with another loss than the longest run has there."""
    longest = max(losses, key=len, default=[])
    return sum(one != other for run in losses for one, other in zip(run, longest, strict=False))


ABOUT = """\
*clients*: {sampling} sampling and {training} training clients of the official SDK, each with a
session of its own, in {processes} processes on the server's cores, for {seconds:.0f} s; at a lower
priority, since they would be on other machines. Each works, and waits {pace_s:g} s on average
before it works again. Every answer is checked: samples against those that the server gave of the
same prompt and seed when it did nothing else, the losses of each step against those of the other
models, which are trained alike; and the answers are counted against what the server has on record.
A bystander asks for a sample ten times a second, at fixed times, and polls once more for its
result. The server's resident memory was {before:.0f} MB before, {early:.0f} MB in the second
quarter of the time, {late:.0f} MB in the last, {after:.0f} MB after the clients had gone; it had
{open} descriptors open. It had the time of {server_cores:.2f} cores, the clients
of the SDK that of {client_cores:.2f}; the bystander waits for what is left."""
