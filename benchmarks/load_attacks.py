"""What a bystander sees while somebody else attacks the server."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass

from benchmarks.lib.attacks import ATTACKS, LONG_PROMPTS, QUEUED_SAMPLES, Victim
from benchmarks.lib.bystander import Bystander, SamplingBystander, Seen, TrainingBystander
from benchmarks.lib.footprint import History, watched
from benchmarks.lib.machine import ROOT
from benchmarks.lib.report import Cell, Target
from benchmarks.lib.server import Served
from tests.serving import Server
from tinkercloud.storage.keys import KeyStore

CALM_S = 60.0  # at most, until what an attack left is done
END_S = 20.0  # that an attacker may take over its time, with its start
STALL_MS = 1000.0
WHO_TRAINS = ", who trains"
COLUMNS = (
    *("attack", "answers", "bystander failed", "p50 before ms", "p50 during", "p50 after"),
    *("p99 before ms", "p99 during", "p99 after", "memory most MB"),
)


@dataclass(frozen=True)
class Attacked:
    name: str
    answers: str
    before: Seen
    during: Seen
    after: Seen
    history: History

    @property
    def failed(self) -> int:
        return sum(len(seen.failures) for seen in (self.before, self.during, self.after))

    def cells(self) -> Sequence[Cell]:
        seen = (self.before, self.during, self.after)
        p50 = [round(each.whole_ms(0.5), 1) for each in seen]
        p99 = [round(each.whole_ms(0.99), 1) for each in seen]
        memory_mb = round(self.history.most.memory_mb)
        return (self.name, self.answers, self.failed, *p50, *p99, memory_mb)


async def measure(
    server: Server, served: Served, names: Sequence[str], phase_s: float, scale: float = 1.0
) -> tuple[list[Attacked], float]:
    """phase_s: for each of before, during and after. scale: as of `Victim`. Also returns how often
    the bystander asked, in seconds."""
    with closing(KeyStore(server.data_dir)) as keys:
        attacker, key = keys.add("attacker"), keys.add("bystander")
    victim = Victim(
        *(server.base_url, attacker, served.base_model, served.context, served.vocabulary),
        seconds=phase_s,
        scale=scale,
    )
    address = (server.base_url, key, served.base_model)
    sampling = await SamplingBystander.connect(*address)
    training = await TrainingBystander.connect(*address)
    bystanders: dict[str, Bystander] = {"": sampling, WHO_TRAINS: training}
    for each in bystanders.values():
        await each.settle(20)
    period_s = max(each.period_s for each in bystanders.values())
    results: list[Attacked] = []
    for name in names:
        for who, bystander in bystanders.items():
            bystander.period_s = period_s
            if who and name != QUEUED_SAMPLES:
                continue
            results.append(await _attacked(server, bystander, name, who, victim))
            # At once: the server may not live to the end of all.
            print(*results[-1].cells(), sep=" | ", file=sys.stderr)
            await bystander.wait_for_calm(CALM_S)
    for each in bystanders.values():
        each.close()
    return results, period_s


async def _attacked(
    server: Server, bystander: Bystander, name: str, who: str, victim: Victim
) -> Attacked:
    assert server.process is not None
    async with watched(server.process.pid) as points:
        async with bystander.watching() as before:
            await asyncio.sleep(victim.seconds)
        async with bystander.watching() as during:
            answers = await _attack(name, victim)
        async with bystander.watching() as after:
            await asyncio.sleep(victim.seconds)
    return Attacked(name + who, answers, before, during, after, History(points))


async def _attack(name: str, victim: Victim) -> str:
    """In a process of its own; what it says of the answers."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.lib.attacks", name, json.dumps(asdict(victim))),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    try:
        async with asyncio.timeout(victim.seconds + END_S):
            out, _ = await process.communicate()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        await process.wait()
        return "it did not end"
    return out.decode().strip() or f"it ended with {process.returncode}"


def targets(results: Sequence[Attacked]) -> list[Target]:
    failed = sum(each.failed for each in results)
    goals = [Target.at_most("requests of the bystander that failed", failed, 0)]
    for each in results:
        p99_ms = each.during.whole_ms(0.99)
        goals.append(Target.at_most(f"{each.name}: p99 during, ms", p99_ms, STALL_MS, 0))
        if each.name == LONG_PROMPTS:
            slower = each.during.whole_ms(0.5) / each.before.whole_ms(0.5)
            goals.append(Target.at_most(f"{each.name}: p50 during / before", slower, 2.0))
    return goals


ALL = tuple(ATTACKS)
ABOUT = """\
*attacks*: one key holder, or nobody's key, against a server, from a process of its own on the same
cores; meanwhile a bystander with another key asks for a sample of 4 tokens ("who trains": for a
forward_backward of 8) every {period:.2g} s, at fixed times, and the table has the time from then
until the result is there: for {phase:g} s before the attack, while it goes on ({phase:g} s and
until the attacker has its answers), and {phase:g} s after. That is ten times a second, or for a
fifth of the server's time where this is more seldom. The attacker runs at a lower priority, since
it would be on another machine; its work is on the same cores all the same. *answers*: what the
attacker got, by status; "failed": a result that says why it was refused; "cut off": some of its
requests had no answer 5 s after its time was up. The next attack begins when the bystander's
requests take about as long as alone again, after {calm:g} s at the latest."""
