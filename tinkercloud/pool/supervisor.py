"""A running pool: workers, llama-server over those that live, and what happens when one dies.

One thread. llama-server aborts or hangs when an RPC server goes away, so whenever a worker that
holds layers is lost it is ended, and the model started again on what is left, or refused.
"""

import logging
import os
import threading
import time

from tinkercloud.errors import ConfigError
from tinkercloud.pool.binaries import INSTALL, LLAMA_SERVER, find_program, knows_rpc
from tinkercloud.pool.drafting import draft_text
from tinkercloud.pool.layer_plan import Device, LayerPlan, plan_layers
from tinkercloud.pool.llama_server import LlamaServer, server_command
from tinkercloud.pool.model_file import read_model_file
from tinkercloud.pool.pool_file import Model, PoolFile
from tinkercloud.pool.pool_state import Phase, PoolFolder, PoolState
from tinkercloud.pool.worker_link import WorkerLink, WorkerLost

logger = logging.getLogger(__name__)

TICK_S = 0.25
CHECK_S = 1.0
START_S = 120.0
RETRY_S = 5.0
MAX_STARTS = 3
"""Of llama-server for one plan: what ended it may have been an accident."""


class Supervisor:
    """`run` until `ended`. Raises ConfigError where the pool cannot start at all."""

    def __init__(self, pool: PoolFile, model: Model, folder: PoolFolder):
        self._pool, self._model, self._folder = pool, model, folder
        self._program = find_program(LLAMA_SERVER, pool.coordinator.llama_server)
        self._links = {worker.name: WorkerLink(worker, folder.path) for worker in pool.workers}
        self._lost: dict[str, float] = {}  # when to try again
        self._up: set[str] = set()
        self._server: LlamaServer | None = None
        self._plan: LayerPlan | None = None
        self._starts = 0
        self._checked = 0.0
        self.state = PoolState(os.getpid(), model=model.name)

    def run(self, ended: threading.Event) -> None:
        self.state.wish = self._folder.wished()[0]  # an earlier run's
        self._say("starting", "waiting for workers")
        try:
            if self._pool.workers and not knows_rpc(self._program):
                raise ConfigError(f"{self._program} is built without RPC; {INSTALL}")
            self._start_workers(ended)
            if not ended.is_set():
                self._start_model()
            while not ended.wait(TICK_S):
                self._tick()
            self._say("stopped", "")
        except ConfigError as error:
            self._say("failed", str(error))
            raise
        finally:
            self._end_server()
            for link in self._links.values():
                link.end()

    def _start_workers(self, ended: threading.Event) -> None:
        """Those that are not up in time are left out."""
        for link in self._links.values():
            link.start()
        deadline = time.monotonic() + START_S
        waiting, next_report_s = set(self._links), 0.0
        while waiting and time.monotonic() < deadline and not ended.is_set():
            for name in sorted(waiting):
                if self._came_up(name) or name in self._lost:
                    waiting.discard(name)
            if waiting and time.monotonic() > next_report_s:
                left = deadline - time.monotonic()
                logger.info("waiting for %s, %.0f s more", ", ".join(sorted(waiting)), left)
                next_report_s = time.monotonic() + 10.0
            ended.wait(TICK_S)
        for name in waiting:
            self._lose(WorkerLost(name, f"not up within {START_S:.0f} s"))

    def _came_up(self, name: str) -> bool:
        try:
            if not self._links[name].is_up():
                return False
        except WorkerLost as error:
            self._lose(error)
            return False
        self._up.add(name)
        self._lost.pop(name, None)
        self.state.workers[name] = "up"
        logger.info("worker %s is up", name)
        return True

    def _tick(self) -> None:
        number, model = self._folder.wished()
        if number > self.state.wish and model is not None:
            self.state.wish = number
            logger.info("swapping to %s", model.name)
            self._model = model
            self._start_model()
        if time.monotonic() >= self._checked + CHECK_S:
            self._checked = time.monotonic()
            self._check_workers()
            self._revive_workers()
        if self._server is not None:
            self._check_server(self._server)

    def _check_workers(self) -> None:
        lost = list[WorkerLost]()
        for name in sorted(self._up):
            try:
                self._links[name].check()
            except WorkerLost as error:
                lost.append(error)
        for error in lost:
            self._lose(error)
        if any(error.worker in self._holders() for error in lost):
            self._start_model()

    def _revive_workers(self) -> None:
        """A model that runs on the others goes on there; one that was refused is tried again."""
        revived = False
        for name, due in list(self._lost.items()):
            link = self._links[name]
            if time.monotonic() >= due:
                self._lost[name] = time.monotonic() + START_S
                link.start()
            try:
                if link.worker.start == "by_hand":
                    link.restart_servers()  # nobody knows what they hold, or whether they live
                revived |= link.is_up() and self._came_up(name)
            except WorkerLost as error:
                self._lost[name] = min(self._lost[name], time.monotonic() + RETRY_S)
                self.state.workers[name] = error.reason
            except ConfigError as error:
                self.state.workers[name] = str(error)
        if revived and self.state.phase == "refused":
            self._start_model()
        elif revived:
            self._folder.write(self.state)

    def _check_server(self, server: LlamaServer) -> None:
        if server.has_ended:
            reason = server.reason()
            self._check_workers()  # which may have been why, and has then started it again
            if self._server is not server:
                return
            logger.error("llama-server ended: %s", reason)
            if self._starts < MAX_STARTS and self._plan is not None:
                self._start_server(self._plan)
                return
            self._end_server()
            log = self._folder.path / "llama-server.log"
            self._say("failed", f"llama-server ended {MAX_STARTS} times; see {log}: {reason}")
        elif self.state.phase == "loading" and server.is_ready():
            self._say("ready", "")
            logger.info(
                "ready: %s serves %s at %s/v1", "llama-server", self._model.name, server.url
            )

    def _start_model(self) -> None:
        self._end_server()
        self._starts = 0
        try:
            file = read_model_file(self._model.path)
            devices = self._devices()
            self.state.devices = [(device.label, device.memory_bytes) for device in devices]
            self._plan = plan_layers(file, self._model, devices, self._pool.coordinator.reserve)
            self.state.drafts = draft_text(self._model)
        except ConfigError as error:
            self._plan = None
            self.state.plan, self.state.drafts = [], ""
            self._say("refused", str(error))
            logger.error("%s is refused: %s", self._model.name, error)
            return
        self.state.plan = self._plan.lines()
        for line in self.state.plan:
            logger.info("%s", line)
        if self.state.drafts:
            logger.info("drafts: %s, verified by the pool (llama.cpp's own)", self.state.drafts)
        self._start_server(self._plan)

    def _start_server(self, plan: LayerPlan) -> None:
        self._end_server()
        self._starts += 1
        coordinator = self._pool.coordinator
        command = server_command(self._program, coordinator, plan)
        self._server = LlamaServer(command, coordinator, self._folder.path / "llama-server.log")
        self.state.llama_server_pid, self.state.url = self._server.pid, f"{self._server.url}/v1"
        self._say("loading", "")

    def _devices(self) -> list[Device]:
        """Of what lives, in llama.cpp's order."""
        coordinator = self._pool.coordinator
        up = [link for name, link in self._links.items() if name in self._up]
        devices = [Device("coordinator", "CPU", coordinator.memory)] if coordinator.memory else []
        for link in up:
            sharing = sum(each.is_on_machine_of(link) and each.shares_ram for each in up)
            devices += link.devices(sharing)
        for gpu in coordinator.gpus:
            if gpu.memory is None:
                raise ConfigError(
                    f"coordinator.gpus: say how much memory {gpu.device} lends (memory: 8GiB)"
                )
            devices.append(Device("coordinator", gpu.device, gpu.memory))
        return devices

    def _holders(self) -> set[str]:
        return set() if self._plan is None else {each.device.owner for each in self._plan.shares}

    def _lose(self, error: WorkerLost) -> None:
        logger.error("%s", error)
        self._up.discard(error.worker)
        self._links[error.worker].end()
        self._lost[error.worker] = time.monotonic() + RETRY_S
        self.state.workers[error.worker] = error.reason
        self._folder.write(self.state)

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.end()
            self._server = None
            self.state.llama_server_pid = None

    def _say(self, phase: Phase, text: str) -> None:
        self.state.phase, self.state.text, self.state.model = phase, text, self._model.name
        self._folder.write(self.state)
