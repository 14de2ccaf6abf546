"""Workers behind gRPC on loopback, in this process."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.ports import reserved_port
from tests.speculative.pipeline.scripted import MODEL, ScriptedEngine
from tests.waiting import wait_for
from tinkercloud.addresses import Address
from tinkercloud.speculative.drafters.drafter import Drafter
from tinkercloud.speculative.pipeline import Orchestrator
from tinkercloud.speculative.remote.connection import ServerSecurity
from tinkercloud.speculative.remote.methods import DRAFT, VERIFY
from tinkercloud.speculative.remote.service import WorkerServer
from tinkercloud.speculative.remote.target_messages import TargetModel
from tinkercloud.speculative.remote.target_worker import TargetLimits, TargetWorker
from tinkercloud.speculative.remote.worker import DraftWorker


def wait_until_no_session(target: WorkerServer[TargetWorker]) -> None:
    wait_for("no session is left", target.worker.stats, lambda s: s["sessions"] == 0)


def wait_for_drafters(pipeline: Orchestrator) -> None:
    """Until all are connected: it waits for the first of them only, and not for long."""
    drafter = pipeline._drafter
    assert drafter is not None
    wait_for(
        "all drafters are connected", lambda: all(w.is_open for w in drafter._workers.values())
    )


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
        # Not of those that the system gives to whoever asks: none is taken while a server is away.
        address = Address("127.0.0.1", port or reserved_port())
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
