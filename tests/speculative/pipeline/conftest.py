"""Workers behind gRPC on loopback, in this process."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.speculative.pipeline.scripted import MODEL, ScriptedEngine
from tests.waiting import wait_for
from tinkercloud.addresses import Address
from tinkercloud.speculative.drafters.drafter import Drafter
from tinkercloud.speculative.remote.connection import ServerSecurity
from tinkercloud.speculative.remote.methods import DRAFT, VERIFY
from tinkercloud.speculative.remote.service import WorkerServer
from tinkercloud.speculative.remote.target_messages import TargetModel
from tinkercloud.speculative.remote.target_worker import TargetLimits, TargetWorker
from tinkercloud.speculative.remote.worker import DraftWorker


def wait_until_no_session(target: WorkerServer[TargetWorker]) -> None:
    wait_for("no session is left", target.worker.stats, lambda s: s["sessions"] == 0)


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
