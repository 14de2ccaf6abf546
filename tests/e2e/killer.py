"""Ends a server or its engine at chosen moments of a run, and starts the server again.

The moments are seen from outside: in the database (what is acknowledged, what has an outcome), in
the data folder (what is being written) and in the list of processes.
"""

import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from threading import Condition
from typing import Literal

from tests.serving import STOP_LIMIT_S, Server
from tests.waiting import wait_for
from tinkercloud.storage.database_file import DATABASE_NAME

Moment = Literal[
    "acknowledged",  # operations on record that have not begun, behind one that runs
    "pass",  # within a forward_backward
    "sampling",
    "snapshot",  # of a model, while it trains on
    "last snapshot",  # the one that SIGTERM makes the server take
    "checkpoint",  # written whole, about to be renamed
    "start",  # while the server or the engine starts, right after the kill before
    "replay",  # right after such a start, before models are back
]
Target = Literal["server", "engine"]
PARTS: Sequence[tuple[Moment, int]] = (
    ("acknowledged", 5), ("pass", 4), ("sampling", 4), ("snapshot", 2), ("last snapshot", 2),
    ("checkpoint", 3), ("start", 2), ("replay", 3),
)  # fmt: skip
FOLLOWING: frozenset[Moment] = frozenset({"start", "replay"})
TERM_SHARE = 0.12  # of the ends of the server at other moments
LONGEST_DELAY_S: dict[Moment, float] = {
    "pass": 0.15,
    "sampling": 0.25,
    "snapshot": 0.05,
    "checkpoint": 0.03,
    "start": 2.0,
    "replay": 0.4,
}
MOMENT_LIMIT_S = STEP_LIMIT_S = 300.0
WAIT_STEPS = 5
"""A snapshot is taken when it is due. After so many steps without one, SIGTERM makes one due."""
POLL_S = 0.001

PENDING_OPERATIONS = "SELECT COUNT(*) FROM operations WHERE position IS NULL"
PENDING_SAMPLES = "SELECT COUNT(*) FROM futures WHERE status = 'pending' AND sampler_id IS NOT NULL"
PENDING_PASSES = (
    "SELECT COUNT(*) FROM futures WHERE status = 'pending' AND kind = 'ForwardBackward'"
)
SNAPSHOT = "recovery/*/.tmp-*"
SEALED = "checkpoints/*/*/*/.tmp-*/manifest.json"
MODEL_BACK, ENGINE_ENDED = " is back: ", "the engine process ended"
OUTCOMES_SINCE = "SELECT COUNT(*) FROM futures WHERE finished_at > ?"


@dataclass(frozen=True)
class Kill:
    """step: of the loop, before which it does not come. delay_s: after the moment is seen."""

    step: int
    moment: Moment
    target: Target
    how: signal.Signals = signal.SIGKILL
    delay_s: float = 0.0


@dataclass
class Killed:
    """A kill as it came. at_s: since the run began. pending: what was acknowledged and had no
    outcome. found: what the data folder or the log showed afterwards. down_s: of the server's
    start; 0 of an engine, which the server starts by itself."""

    moment: Moment
    target: Target
    signal: str
    at_s: float
    pending_operations: int
    pending_samples: int
    found: str = ""
    down_s: float = 0.0


def schedule(seed: int, num_kills: int) -> list[Kill]:
    """One kill in a step, but for those that follow another one. Not more than two ends of the
    engine in one life of the server, which starts it the slower the more there were."""
    generator = random.Random(seed)
    deck = [moment for moment, num in PARTS for _ in range(num)]
    moments: list[Moment] = []
    while len(moments) < num_kills:
        moments += generator.sample(deck, len(deck))
    kills: list[Kill] = []
    for moment in moments[:num_kills]:
        kills.append(_kill(generator, moment, kills))
    return kills


def _kill(generator: random.Random, moment: Moment, kills: Sequence[Kill]) -> Kill:
    if not kills and moment in FOLLOWING:
        moment = "pass"
    step = kills[-1].step + (moment not in FOLLOWING) if kills else 0
    recent = [kill.target for kill in kills[-2:]]
    target: Target = "engine" if generator.random() < 0.4 else "server"
    if recent == ["engine", "engine"] or moment == "last snapshot":
        target = "server"
    if moment == "start" and recent:
        target = recent[-1]  # what is starting is what was ended
    is_term = target == "server" and moment not in FOLLOWING and generator.random() < TERM_SHARE
    how = signal.SIGTERM if is_term and moment != "last snapshot" else signal.SIGKILL
    delay_s = generator.uniform(0, LONGEST_DELAY_S.get(moment, 0.0))
    return Kill(step, moment, target, how, delay_s)


class Killer:
    """Carries a schedule out. `run` is for a thread of its own; `begins` is told of the loop's
    steps by another one. log: of all lives of the server but the last."""

    def __init__(self, server: Server, kills: Sequence[Kill], num_steps: int):
        self._server = server
        self._kills = kills
        self._num_steps = num_steps
        self._step = -1
        self._changed = Condition()
        self._began = time.monotonic()
        self._ended_at = 0.0  # of the last kill: s since the epoch
        self._ended_engine: int | None = None
        self._is_up = True
        self.killed: list[Killed] = []
        self.log = ""

    @property
    def step(self) -> int:
        """The loop's last one that began."""
        return self._step

    def begins(self, step: int) -> None:
        with self._changed:
            self._step = step
            self._changed.notify_all()

    def run(self) -> None:
        """Until all are done, or the loop has ended; then the server is up."""
        for kill in self._kills:
            if kill.moment == "start":
                self._kill_at_start(kill)
                continue
            self._be_up()
            with self._changed:
                begun = self._changed.wait_for(
                    lambda step=kill.step: self._step >= step, STEP_LIMIT_S
                )
            assert begun, f"the loop does not come to its step {kill.step}"
            if not self._moment_comes(kill):
                return
            if kill.moment == "last snapshot" or not self._is_due(kill):
                self._kill_while_stopping(kill)
            else:
                self._kill(kill)
        self._be_up()

    # moments

    def _moment_comes(self, kill: Kill) -> bool:
        """False: the loop has ended before."""
        if kill.moment == "replay":
            self._await_engine()
            return True
        data_dir = self._server.data_dir
        moments: dict[Moment, Callable[[], bool]] = {
            "acknowledged": lambda: self._count(PENDING_OPERATIONS) >= 2,
            "pass": lambda: self._count(PENDING_PASSES) >= 1,
            "sampling": lambda: self._count(PENDING_SAMPLES) >= 1,
            "snapshot": lambda: _any(data_dir, SNAPSHOT) or self._step >= kill.step + WAIT_STEPS,
            "last snapshot": lambda: self._count(PENDING_OPERATIONS) >= 1,
            "checkpoint": lambda: _any(data_dir, SEALED),
        }
        # Something has been computed since the last kill: the run goes on between kills.
        return self._wait(lambda: self._count(OUTCOMES_SINCE, self._ended_at) >= 1) and self._wait(
            moments[kill.moment]
        )

    def _is_due(self, kill: Kill) -> bool:
        return kill.moment != "snapshot" or self._step < kill.step + WAIT_STEPS

    def _wait(self, seen: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + MOMENT_LIMIT_S
        while not seen():
            if self._step >= self._num_steps:
                return False
            assert time.monotonic() < deadline, "the moment of a kill does not come"
            time.sleep(POLL_S)
        return True

    def _count(self, query: str, *values: float) -> int:
        path = self._server.data_dir / DATABASE_NAME
        try:
            with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
                return connection.execute(query, values).fetchone()[0]
        except sqlite3.OperationalError:  # the server has just opened or closed it
            return 0

    # ends

    def _kill(self, kill: Kill) -> None:
        engine = self._new_engine() if kill.target == "engine" else None
        time.sleep(kill.delay_s)
        killed = self._note(kill, kill.target, kill.how)
        if engine is not None:
            self._end_engine(engine)
        else:
            self._end_server(kill.how)
        killed.found = self._found(kill.moment)

    def _kill_while_stopping(self, kill: Kill) -> None:
        """SIGTERM, and SIGKILL once it writes a snapshot."""
        killed = self._note(kill, "server", signal.SIGTERM)
        killed.moment = "last snapshot"
        process = self._server.process
        assert process is not None
        process.terminate()
        wait_for(
            "the server stops or writes a snapshot",
            lambda: process.poll() is not None or _any(self._server.data_dir, SNAPSHOT),
            limit_s=STOP_LIMIT_S,
            poll_s=POLL_S,
        )
        if process.poll() is None:
            killed.signal = signal.SIGKILL.name
        self._end_server(signal.SIGKILL)
        killed.found = self._found("last snapshot")

    def _kill_at_start(self, kill: Kill) -> None:
        if self._is_up:
            engine = self._new_engine()
            time.sleep(kill.delay_s)
            killed = self._note(kill, "engine", signal.SIGKILL)
            self._end_engine(engine)
        else:
            self._server.launch()
            time.sleep(kill.delay_s)
            killed = self._note(kill, "server", signal.SIGKILL)
            self._end_server(signal.SIGKILL)
        killed.found = self._found(kill.moment)

    def _note(self, kill: Kill, target: Target, how: signal.Signals) -> Killed:
        at_s, self._ended_at = time.monotonic() - self._began, time.time()
        pending = self._count(PENDING_OPERATIONS), self._count(PENDING_SAMPLES)
        self.killed.append(Killed(kill.moment, target, how.name, at_s, *pending))
        return self.killed[-1]

    def _end_server(self, how: signal.Signals) -> None:
        if how is signal.SIGKILL:
            self._server.kill()
        else:
            self._server.stop(how)
        self._is_up, self._ended_engine = False, None
        self.log += self._server.output()

    def _end_engine(self, engine: int) -> None:
        os.kill(engine, signal.SIGKILL)
        self._ended_engine = engine

    def _be_up(self) -> None:
        if self._is_up:
            return
        began = time.monotonic()
        self._server.start()
        self._is_up = True
        self.killed[-1].down_s = time.monotonic() - began

    def _new_engine(self) -> int:
        """Also one that is only starting."""
        engine = wait_for(
            "there is a new engine",
            self._server.find_engine,
            lambda pid: pid not in (None, self._ended_engine),
            limit_s=MOMENT_LIMIT_S,
            poll_s=POLL_S,
        )
        assert engine is not None
        return engine

    def _await_engine(self) -> None:
        self._new_engine()
        with self._server.http() as http:
            wait_for(
                "the server is healthy",
                lambda: http.get("/health").json(),
                lambda health: health["status"] == "ok",
                limit_s=MOMENT_LIMIT_S,
            )

    def _found(self, moment: Moment) -> str:
        data_dir = self._server.data_dir
        if moment in ("snapshot", "last snapshot"):
            return "half written" if _any(data_dir, SNAPSHOT) else "written"
        if moment == "checkpoint":
            return "before the rename" if _any(data_dir, SEALED) else "after the rename"
        if moment in FOLLOWING:
            since_start = self._server.output().rpartition(ENGINE_ENDED)[2]
            return "models back" if MODEL_BACK in since_start else "models not back"
        return ""


def _any(data_dir: Path, pattern: str) -> bool:
    return next(data_dir.glob(pattern), None) is not None
