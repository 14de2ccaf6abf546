"""Workers behind gRPC on loopback, in this process."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.speculative.pipeline.scripted import MODEL, ScriptedEngine
from tinkercloud.addresses import Address
from tinkercloud.speculative.drafters.drafter import Drafter
from tinkercloud.speculative.remote.connection import ServerSecurity
from tinkercloud.speculative.remote.methods import DRAFT, VERIFY
from tinkercloud.speculative.remote.service import WorkerServer
from tinkercloud.speculative.remote.target_messages import TargetModel
from tinkercloud.speculative.remote.target_worker import TargetLimits, TargetWorker
from tinkercloud.speculative.remote.worker import DraftWorker

LIMIT_S = 20.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Workers:
    def __init__(self) -> None:
        self.servers: list[WorkerServer[Any]] = []

    def target(
        self,
        engine: ScriptedEngine,
        limits: TargetLimits | None = None,
        model: TargetModel = MODEL,
        port: int = 0,
        security: ServerSecurity | None = None,
    ) -> WorkerServer[TargetWorker]:
        worker = TargetWorker(model, engine, limits)
        return self._start(worker, VERIFY, port, security)

    def draft(self, drafter: Drafter) -> WorkerServer[DraftWorker]:
        return self._start(DraftWorker(lambda _: drafter), DRAFT, 0, None)

    def _start(
        self, worker: Any, method: Any, port: int, security: ServerSecurity | None
    ) -> WorkerServer[Any]:
        address = Address("127.0.0.1", port)
        server = WorkerServer.start(worker, method, address, security or ServerSecurity())
        self.servers.append(server)
        return server


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    for server in workers.servers:
        server.stop()


def at(server: WorkerServer[Any]) -> str:
    return f"127.0.0.1:{server.port}"
