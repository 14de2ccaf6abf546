"""Commands about runs that are kept (`tinkercloud replay`, `branch`, `receipt`, `verify`, `diff`),
each a process of its own with its own engine, on the data folder of the server that is running."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.simulation.engine import SimulatedEngine
from tests.simulation.loop import Process, SimulatedLoop, in_process
from tests.simulation.schedule import Command
from tests.simulation.sqlite import Connector
from tinkercloud.errors import StorageFailed, TinkercloudError
from tinkercloud.services.common.catalog import Catalog
from tinkercloud.services.runs.branches import put_branch
from tinkercloud.services.runs.differences import compare
from tinkercloud.services.runs.kept_runs import KeptRun, KeptRuns
from tinkercloud.services.runs.receipts import (
    Base,
    Workshop,
    receipt_of_sample,
    receipt_of_step,
)
from tinkercloud.services.runs.replay import RunReplay
from tinkercloud.services.runs.verification import Verifier
from tinkercloud.storage.archive import ArchiveStorage
from tinkercloud.storage.database import Database
from tinkercloud.storage.journal import Snapshot

OPERATION_S = 0.02


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a command needs of the world. samples: ids of samplers and
    numbers of samples that clients have. fail: gets what is wrong."""

    loop: SimulatedLoop
    delay_s: Callable[[], float]
    scratch: Path
    samples: Callable[[], list[tuple[str, int]]]
    fail: Callable[[str], None]


class Commands:
    """Those that run. ended: gets each that is killed, before it is."""

    def __init__(self, around: Surroundings, ended: Callable[[Process], None]):
        self._around = around
        self._ended = ended
        self._runs: list[CommandRun] = []

    def begin(self, command: Command, data_dir: Path) -> None:
        run = CommandRun(command, data_dir, self._around)
        self._runs.append(run)
        in_process(run.process, self._around.loop.create_task, run.run())

    def has(self, process: Process) -> bool:
        return any(run.process is process for run in self._runs)

    @property
    def are_done(self) -> bool:
        return all(run.is_done for run in self._runs)

    @property
    def may_have_left_files(self) -> bool:
        """Whether one was cut short since the server began."""
        return any(run.is_cut_short for run in self._runs)

    def end(self, process: Process | None = None) -> None:
        """One of them; None: all, and what they left the next server removes as it begins."""
        for run in self._runs:
            if not run.is_done and process in (None, run.process):
                self._ended(run.process)
                run.end()
        if process is None:
            self._runs.clear()


class CommandRun:
    """One command. process: ends when it does, or by a crash. is_cut_short: it was killed, or the
    database took no row of it."""

    def __init__(self, command: Command, data_dir: Path, around: Surroundings):
        self._command = command
        self._data_dir = data_dir
        self._around = around
        self._choices = random.Random(f"{command.seed} command")
        self.process = Process(f"command {command.kind}")
        self.is_cut_short = False
        self._engine = SimulatedEngine(
            *(around.loop, self._choices, lambda number: "fine", lambda *event: None, OPERATION_S)
        )
        self._engine.serve(self.process)

    @property
    def is_done(self) -> bool:
        return not self.process.alive or not self.process.unfinished()

    def end(self) -> None:
        self.is_cut_short = True
        self.process.alive = False
        self._engine.end()

    async def run(self) -> None:
        connector = Connector(self._around.loop, self._around.delay_s)
        database = await Database.open(self._data_dir, connector=connector)
        try:
            await self._do(database)
        except StorageFailed:
            self.is_cut_short = True
        except TinkercloudError:  # by name: what it is for is not kept, or goes while it is read
            pass
        except Exception as error:  # noqa: BLE001 - a command that ends so has failed
            self._around.fail(f"{self.process.name}: {error!r}")
        finally:
            await database.close()

    async def _do(self, database: Database) -> None:
        runs = KeptRuns(database, self._data_dir)
        names = [run.model_id for run in await ArchiveStorage(database).runs()]
        chosen = self._choices.sample(names, min(len(names), 2)) or ["a run that is not there"]
        kept = await runs.find(chosen[0])
        if self._command.kind == "diff":
            await compare(runs, kept, await runs.find(chosen[-1]))
            return
        catalog = Catalog(await self._engine.start())
        place = self._around.scratch / f"command-{self._command.seed}"
        for name in ("made", "checked"):
            (place / name).mkdir(parents=True)
        workshop = Workshop(self._engine, catalog, runs, place / "made", place / "weights")
        first, last = kept.steps
        step = self._choices.randint(first, max(first, last))
        match self._command.kind:
            case "replay":
                beginning = self._choices.choice((kept.beginning, kept.nearest(kept.run.last - 1)))
                await self._repeat(RunReplay(self._engine, catalog, runs), kept, beginning)
            case "branch":
                until = await runs.position_of_step(kept, step)
                await workshop.reach(kept, until)
                await put_branch(database, self._data_dir, self._engine, kept, step)
            case "receipt of step":
                base = Base(kept.model.base_model, None)
                await self._check(workshop, await receipt_of_step(workshop, base, kept, step))
            case "receipt of sample":
                await self._check_sample(workshop)

    async def _repeat(self, replay: RunReplay, kept: KeptRun, beginning: Snapshot | None) -> None:
        async for repeated in replay.repeat(kept, beginning, kept.run.last):
            if not repeated.agrees:
                operation = repeated.operation
                self._around.fail(
                    f"{operation.kind} {operation.position} of {kept.run.model_id} gives other "
                    "bits beside the server"
                )

    async def _check_sample(self, workshop: Workshop) -> None:
        samples = self._around.samples()
        if not samples:
            return
        sampled = await workshop.runs.sample(*self._choices.choice(samples))
        if sampled is not None:
            name = (await workshop.runs.sampler(sampled)).base_model
            receipt = await receipt_of_sample(workshop, Base(name, None), sampled)
            await self._check(workshop, receipt)

    async def _check(self, workshop: Workshop, receipt: dict[str, Any]) -> None:
        """As a stranger does, with an engine that knows nothing of the run."""
        receipt.pop("receipt"), receipt.pop("hashes")
        model_id = receipt.get("run")
        if model_id is not None:
            await workshop.backend.delete_model(model_id)
        base = Base(receipt["base"]["name"], None)
        checked = workshop.scratch.parent / "checked"
        verifier = Verifier(workshop.backend, workshop.catalog, base, checked)
        weights = workshop.weights_out
        assert weights is not None
        result = await verifier.check(receipt, weights if weights.exists() else None)
        if not result.is_same:
            self._around.fail(f"{self.process.name}: {result}")
