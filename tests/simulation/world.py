"""One run: a server that crashes and starts again, its engine, its disk, and its clients.

The world itself is a process that no fault touches. When the programs have ended, faults end too;
the invariants are checked when everything is at rest, and once more after a last power cut.
"""

import asyncio
import random
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.simulation import image, sqlite
from tests.simulation.agents import Agent
from tests.simulation.bodies import draw_late
from tests.simulation.commands import Commands, Surroundings
from tests.simulation.coverage import Coverage, places_on_disk, suspended_at
from tests.simulation.crash_plans import AwaitCrashes, plans_of
from tests.simulation.disk import Disk
from tests.simulation.disk_troubles import DiskTroubles
from tests.simulation.engine import SimulatedEngine
from tests.simulation.history import History
from tests.simulation.loop import EPOCH_S, PROCESS, Process, ProcessEnded, SimulatedLoop, in_process
from tests.simulation.network import Network
from tests.simulation.patches import simulated
from tests.simulation.scenes import Player
from tests.simulation.schedule import USERS, Command, Crash, CrashKind, Schedule
from tests.simulation.server import Server
from tests.simulation.wires import GmiWire, SdkWire
from tinkercloud.services.recovery.returns import GIVEN_UP_S, CannotComeBack

MAX_STEPS = 400_000
REST_S = 900.0  # of virtual time, for everything to come to rest without faults
RETRY_START_S = 3.0


class World:
    """trace: gets (virtual seconds, text) of what happens. failures: what was found wrong."""

    def __init__(self, schedule: Schedule, place: Path, trace: Callable[[float, str], None]):
        def stream(name: str) -> random.Random:
            return random.Random(f"{schedule.seed} {name}")

        self.schedule = schedule
        self._trace = trace
        self.loop = SimulatedLoop(stream("order"), in_order=schedule.in_order)
        self.loop.before_step = self._before_step
        self._entropy = stream("entropy")
        self._choices = stream("world")
        self.coverage = Coverage()
        self.history = History()
        self.failures: list[str] = []
        self.cleaned_up_at = 0.0  # by the wall clock
        self.moments: dict[float, float] = {}
        """When it was what by the wall clock: no row can say, for that clock is set."""
        self.disk = Disk(place, self._on_disk)
        self.network = Network(
            *(self.loop, stream("network"), schedule.network_fate, schedule.outage),
            self._on_event,
        )
        self.engine = SimulatedEngine(
            *(self.loop, stream("engine"), schedule.engine_fate, self._on_event),
            operation_s=schedule.operation_s,
        )
        self.engine.other_numerics_from = schedule.other_numerics_from
        delay_s = partial(sqlite.delay_s, self._choices)
        self.connector = sqlite.Connector(self.loop, delay_s)
        self._plans = plans_of(schedule)
        self._at_awaits = AwaitCrashes(schedule)
        self._look_for_next()
        self.num_crashes: Counter[str] = Counter()
        self.faults_on = True
        self.server: Server | None = None
        self._place, self._scratch = place, place.with_name(f"{place.name}-scratch")
        self._world = Process("world")
        later = partial(in_process, self._world, self.loop.call_later)
        self._troubles = DiskTroubles(schedule.disk, later, self.note)
        self._clients: list[Process] = []
        self.commands = Commands(
            Surroundings(
                *(self.loop, delay_s, self._scratch, self.history.samples),
                lambda text: None if self._troubles.has_come else self.fail(text),
            ),
            self._note_killed,
        )

    def run(self, check: Callable[["World"], Any]) -> None:
        """check: called at rest; finds what is wrong and adds it to `failures`."""
        image_folder, self.keys = image.prepared(self.schedule.checkpoint_bytes)
        self.disk.begin_from(image_folder)
        with simulated(self.loop, self.wall, self._entropy, self.disk, self.schedule.all_is_large):
            sqlite.VFS.disk, sqlite.VFS.loop = self.disk, self.loop
            try:
                main = in_process(self._world, lambda: self._main(check))
                in_process(self._world, self.loop.run, main, MAX_STEPS)
            except Exception as error:  # noqa: BLE001 - what a run raises, it fails with
                self.fail(f"{type(error).__name__}: {error}")
            finally:
                self._tear_down()
        self.failures += self.loop.problems

    def _tear_down(self) -> None:
        self.loop.close()
        self.disk.close()
        self.loop.unwind()
        self.connector.close_all()
        sqlite.VFS.disk = sqlite.VFS.loop = None
        for folder in (self._place, self._scratch):
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def places_met(self) -> frozenset[str]:
        """Of the schedule's `places` those that a crash came at."""
        return frozenset(self._at_awaits.met)

    def wall(self) -> float:
        """Seconds since the epoch, by a clock that is set now and then."""
        jumps = (jump.by_s for jump in self.schedule.jumps if jump.at_s <= self.loop.now)
        wall = EPOCH_S + self.loop.now + sum(jumps)
        self.moments[wall] = self.loop.now
        return wall

    def fail(self, text: str) -> None:
        self.failures.append(text)
        self.note(f"FAILED {text}")

    def note(self, text: str) -> None:
        self._trace(self.loop.now, text)

    # ---- the run

    async def _main(self, check: Callable[["World"], Any]) -> None:
        await self._start_server()
        for number, (user, program) in enumerate(zip(USERS, self.schedule.programs, strict=True)):
            wire = (SdkWire, GmiWire)[number % 2](
                self.network, self.keys[user], self.schedule.give_up_s[number]
            )
            agent = Agent(user, self.network, self.keys, self.history)
            client = Player(user, wire, agent, program, self.history)
            process = Process(f"client {user}")
            self._clients.append(process)
            in_process(process, self.loop.create_task, client.run())
        for command in self.schedule.commands:
            self.loop.call_later(command.at_s, self._begin_command, command)
        await self._until(lambda: not any(self._unfinished_clients()), "the clients have ended")
        await self._end_faults()
        await check(self)
        if not self.failures:
            self._crash("power", "at rest")
            await self._end_faults()
            await self._sample_what_was_published()
            await check(self)
        if not self.failures:
            await self._stop_for_good()

    def _unfinished_clients(self) -> list[bool]:
        for process in self._clients:
            for task in process.tasks:
                if task.done() and not task.cancelled() and task.exception() is not None:
                    raise AssertionError(f"{process.name}: {task.exception()!r}")
        return [True for process in self._clients if process.alive and process.unfinished()]

    async def _end_faults(self) -> None:
        self.faults_on = False
        self._troubles.end()
        self.network.calm()
        self.engine.calm()
        await self._until(self._at_rest, "everything is at rest")

    def _at_rest(self) -> bool:
        server = self.server
        if server is None or not server.is_up or server.is_stopped:
            return False
        return self.engine.is_up and server.is_idle and self.commands.are_done

    def _begin_command(self, command: Command) -> None:
        if self.faults_on and self.server is not None and self.server.is_up:
            self.commands.begin(command, self.disk.folder)

    def _note_killed(self, process: Process) -> None:
        """Of a command."""
        self.num_crashes["command"] += 1
        self.note(f"{process.name} is killed")
        self.coverage.crashed_at_awaits(process)

    async def _until(self, condition: Callable[[], bool], text: str) -> None:
        deadline = self.loop.now + (REST_S if not self.faults_on else 24 * 3600.0)
        while not condition():
            if self.loop.now > deadline:
                raise AssertionError(f"it never came that {text}")
            await asyncio.sleep(0.5)

    async def bring_back(self) -> None:
        """Every model that can be is in the engine's memory."""
        assert self.server is not None
        services = self.server.services
        for model_id, user in self.history.models.items():
            model = await services.models.find(user, model_id)
            if model is not None:
                try:
                    await services.recovery.ensure(services.tasks.lanes, user, model_id)
                except CannotComeBack:  # it was given up, for that long
                    await asyncio.sleep(GIVEN_UP_S)
                    await services.recovery.ensure(services.tasks.lanes, user, model_id)

    async def _sample_what_was_published(self) -> None:
        """Of two samplers of models' weights, wherever these are kept. Results are in the history,
        for the invariants."""
        saved = [
            request
            for request in self.history.requests
            if request.kind in ("snapshot", "inflight")
            and any(result[0] == "completed" for result in request.results)
            and request.owner.partition(":")[0] not in self.history.finished
        ]
        for request in self._choices.sample(saved, min(len(saved), 2)):
            wire = SdkWire(self.network, self.keys[request.user], 60.0)
            await draw_late(self.history, wire, request.user, request.sampler_id)

    async def clean_up(self) -> None:
        """As the server does each minute."""
        assert self.server is not None
        self.cleaned_up_at = self.wall()
        await self.server.services.checkpoints.remove_expired()
        await self.server.services.checkpoints.remove_unrecorded()

    # ---- the server

    async def _start_server(self) -> None:
        """Until one is up; tried again while the disk is in trouble."""
        while True:
            self.note("the server starts")
            self.connector.begin_process()
            server = self.server = Server(self)
            await server.started_or_ended()
            if server.is_up:
                self.note("the server is up")
                return
            if server.process.alive and server.is_stopped:
                return  # whoever stopped it starts the next
            if server.process.alive:
                server.process.alive = False
                self.engine.end()
                self.disk.after_kill()
                if not self._troubles.is_now and not server.met_trouble:
                    self.fail(f"the server does not start: {server.failure!r}")
                self.note(f"it does not start: {server.failure!r}")
                await asyncio.sleep(RETRY_START_S)
            else:  # a crash while it started: whoever crashed it starts the next
                return

    def _crash(self, kind: CrashKind, label: str, down_s: float = 0.0) -> None:
        """From within whatever runs; the running process, if it is that, must be unwound."""
        server = self.server
        assert server is not None
        self.num_crashes[kind] += 1
        self.note(f"CRASH {kind} at {label}")
        self.coverage.crashed_at_awaits(server.process)
        server.process.alive = False
        self.commands.end()
        self.engine.end()
        self.network.hang_up()
        self.server = None

        async def again() -> None:
            if kind == "power":
                self.disk.after_power_cut(self._choices)
            else:
                self.disk.after_kill()
            await asyncio.sleep(down_s)
            await self._start_server()

        in_process(self._world, self.loop.create_task, again())

    async def _stop(self, down_s: float) -> None:
        """As an operator does, by a signal."""
        server = self.server
        assert server is not None
        await server.stop()
        if self.server is not server:  # it crashed meanwhile
            return
        self.server = None
        server.process.alive = False
        self.commands.end()
        self.engine.end()
        self.disk.after_kill()
        await asyncio.sleep(down_s)
        await self._start_server()

    async def _stop_for_good(self) -> None:
        server = self.server
        assert server is not None
        await server.stop()
        left = [task.get_name() for task in server.process.unfinished()]
        if left:
            self.fail(f"tasks are left after the stop: {sorted(left)}")
        if self.connector.num_open:
            self.fail(f"{self.connector.num_open} connections are open after the stop")

    # ---- faults

    def _before_step(self, process: Process) -> None:
        server = self.server
        if server is not None and process is server.process:
            self._on_event("step", "between two callbacks")

    def _look_for_next(self) -> None:
        self._triggers = {plan.trigger for plan in self._plans}
        is_needed = "await" in self._triggers or self._at_awaits.come
        self.loop.after_step = self._after_step if is_needed else None

    def _after_step(self, process: Process, task: "asyncio.Task[Any]") -> None:
        server = self.server
        if not self.faults_on or server is None:
            return
        is_command = self.commands.has(process)
        if process is not server.process and not is_command:
            return
        for place in suspended_at(task):
            if not is_command:
                self._on_event("await", f"{place}: awaited")
            crash = self._at_awaits.at(place, self.loop.now)
            self.coverage.met.add(place)
            if crash is not None and is_command and crash.kind == "kill":
                self.commands.end(process)
            elif crash is not None and self.server is server:
                self._look_for_next()
                self._meet(crash, f"{place}: awaited")

    def _on_event(self, trigger: str, label: str) -> None:
        if trigger not in self._triggers:
            return
        for plan in self._plans:
            server = self.server
            if not self.faults_on or server is None:
                return
            crash = plan.next_at(trigger, label, is_up=server.is_up)
            if crash is None:
                continue
            self._look_for_next()
            if trigger in ("engine", "answered"):
                self.coverage.crashed_at(f"engine, {label}")
            self._meet(crash, label)

    def _meet(self, crash: Crash, label: str) -> None:
        match crash.kind:
            case "kill" | "power":
                self._crash(crash.kind, label, crash.down_s)
            case "stop":
                self.num_crashes["stop"] += 1
                self.note(f"STOP at {label}")
                in_process(self._world, self.loop.create_task, self._stop(crash.down_s))
            case "engine":
                self.num_crashes["engine"] += 1
                self.note(f"the engine dies at {label}")
                self.engine.die(crash.down_s)
            case "client":
                self._end_client()

    def _end_client(self) -> None:
        process = self._choices.choice(self._clients) if self._clients else None
        if process is not None and process.alive:
            self.num_crashes["client"] += 1
            self.note(f"{process.name} vanishes")
            process.alive = False

    def _on_disk(self, label: str, path: Path) -> None:
        """Before and after each change of the disk."""
        process = PROCESS.get()
        if not process.alive:
            raise ProcessEnded
        if not self.faults_on or process is self._world:
            return
        self._troubles.count(label)
        before = self.num_crashes.total()
        is_flush = "fsync" in label
        for trigger in ("disk", *(("fsync",) if is_flush else ())):
            self._on_event(trigger, f"{label} of {path.name}")
        is_crash = self.num_crashes.total() > before
        if is_crash or (is_flush and self._at_awaits.come):
            places = places_on_disk(label, path.name, sqlite.VFS.changes)
            self.coverage.met.update(places)
            if is_crash or self._crash_at_flush(process, places):
                for place in places:
                    self.coverage.crashed_at(place)
        if not process.alive:
            raise ProcessEnded
        error = self._troubles.refused(label)
        if error is not None:
            if self.server is not None:
                self.server.met_trouble = True
            raise error

    def _crash_at_flush(self, process: Process, places: list[str]) -> bool:
        """Whether one of the schedule came. places: of one flush."""
        came = (self._at_awaits.at(place, self.loop.now) for place in places)
        crashes = [crash for crash in came if crash is not None]
        if not crashes or self.server is None:
            return False
        self._look_for_next()
        if crashes[0].kind == "kill" and self.commands.has(process):
            self.commands.end(process)
        else:
            self._meet(crashes[0], places[0])
        return True
