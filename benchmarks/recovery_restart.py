"""Seconds from a kill to work that is accepted, and to work that is done."""

import os
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.recovery_server import MODE, MODULE
from benchmarks.lib.report import Cell, Target
from benchmarks.lib.server import embedded_flags
from benchmarks.lib.training_http import TrainedModel
from tests.serving import Server, running

COLUMNS = (
    *("killed", "dtype", "journal", "done again", "ready s", "accepted s", "result s", "replay s"),
)
LENGTHS = (0, 10, 40, 160)
QUICK_LENGTHS = (0, 4)
RANK, BATCH, TOKENS = 32, 1, 64
GOAL_S = 5.0
BACK = re.compile(r"is back: .* and (\d+) operations, in ([\d.]+) s")
ABOUT = """\
A model (LoRA of rank 32, operations of one datum of 64 tokens) has as many operations in its
journal as *journal* says, without a snapshot, when SIGKILL ends the server or its engine. From the
kill, in seconds: until the server printed `ready` (it is started at once), until it accepted the
next operation of the model, and until that had its result, which comes after all that is done
again. *done again*, *replay s*: operations, the model's creation among them, and seconds of the
replay by the server's log. Snapshots, which keep journals short, are switched off here."""


@dataclass(frozen=True)
class Restart:
    """From the kill, in seconds; ready_s None: the server went on. replay_s: by its log."""

    killed: str
    dtype: str
    length: int
    done_again: int
    ready_s: float | None
    accepted_s: float
    result_s: float
    replay_s: float

    def cells(self) -> tuple[Cell, ...]:
        ready = "-" if self.ready_s is None else f"{self.ready_s:.2f}"
        times = (round(self.accepted_s, 2), round(self.result_s, 2), self.replay_s)
        return (self.killed, self.dtype, self.length, self.done_again, ready, *times)


async def measure(
    weights: Path, dtypes: Sequence[str], lengths: Sequence[int]
) -> tuple[list[Sequence[Cell]], list[Target]]:
    restarts = [
        await restarted(weights, dtype, killed, length)
        for dtype in dtypes
        for killed in ("server", "engine")
        for length in lengths
    ]
    return [each.cells() for each in restarts], targets(restarts)


def targets(restarts: Sequence[Restart]) -> list[Target]:
    worst_s = max(each.accepted_s for each in restarts)
    return [Target.at_most("seconds from a kill to accepted work", worst_s, GOAL_S)]


async def restarted(weights: Path, dtype: str, killed: str, length: int) -> Restart:
    with tempfile.TemporaryDirectory() as folder:
        flags = embedded_flags(weights, dtype)
        server = Server(flags, Path(folder) / "data", {MODE: "journal"}, module=MODULE)
        with running(server):
            model = await TrainedModel.create(server, RANK)
            for number in range(length):
                odd = number % 2
                sent = model.optim_step() if odd else model.forward_backward(BATCH, TOKENS)
                await model.wait(await sent)
            began = time.perf_counter()
            ready_s = None
            if killed == "server":
                server.restart(how=signal.SIGKILL)
                ready_s = time.perf_counter() - began
            else:
                os.kill(server.engine_pid(), signal.SIGKILL)
            request_id = await model.forward_backward(BATCH, TOKENS)
            accepted_s = time.perf_counter() - began
            await model.wait(request_id)
            result_s = time.perf_counter() - began
            await model.close()
            done_again, replay_s = last_replay(server.output())
    return Restart(
        *(killed, dtype, length, done_again, ready_s, accepted_s, result_s), replay_s=replay_s
    )


def last_replay(log: str) -> tuple[int, float]:
    """Operations and seconds; none where the log has no replay."""
    found = BACK.findall(log)
    return (int(found[-1][0]), float(found[-1][1])) if found else (0, 0.0)
