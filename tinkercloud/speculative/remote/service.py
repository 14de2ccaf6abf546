"""Workers behind gRPC: each client has one bidirectional stream."""

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc

from tinkercloud.addresses import Address
from tinkercloud.speculative.remote.connection import ServerSecurity, grpc_server
from tinkercloud.speculative.remote.methods import StreamMethod
from tinkercloud.speculative.remote.stream_worker import Connection, StreamWorker

logger = logging.getLogger(__name__)

MAX_CLIENTS = 32
CLOSING_S = 1.0
W = TypeVar("W", bound=StreamWorker[Any])


@dataclass(slots=True)
class WorkerServer(Generic[W]):
    """Listens until `stop`. port: the one that it got."""

    worker: W
    port: int
    _server: grpc.Server
    _computing: threading.Thread

    @classmethod
    def start(
        cls, worker: W, method: StreamMethod, address: Address, security: ServerSecurity
    ) -> "WorkerServer[W]":
        """Raises ConfigError."""
        security.check(address)
        server = grpc_server(security, MAX_CLIENTS)
        service, _, name = method.path[1:].partition("/")
        handler = grpc.stream_stream_rpc_method_handler(
            _Calls(worker).serve,
            request_deserializer=method.request.FromString,
            response_serializer=method.answer.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {name: handler}),)
        )
        port = security.listen(server, address)
        computing = threading.Thread(target=worker.run, name="worker", daemon=True)
        computing.start()
        server.start()
        return cls(worker, port, server, computing)

    def stop(self) -> None:
        """Can be called again."""
        self.worker.stop()
        self._computing.join()
        # Not for ever: grpc was seen to miss the end of a call that came while it closed.
        self._server.stop(CLOSING_S).wait(2 * CLOSING_S)


class _Calls:
    def __init__(self, worker: StreamWorker[Any]):
        self._worker = worker

    def serve(self, messages: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        connection = self._worker.open()
        logger.info("client %d at %s", connection.number, context.peer())
        reader = threading.Thread(
            target=self._read, args=(connection, messages), name="reader", daemon=True
        )
        reader.start()
        return iter(connection.outgoing.get, None)

    def _read(self, connection: Connection, messages: Iterator[Any]) -> None:
        try:
            for message in messages:
                self._worker.receive(connection, message)
        except Exception as error:  # noqa: BLE001 - grpc raises the bare class when a call ends
            logger.debug("client %d: %s", connection.number, error)
        finally:
            self._worker.receive(connection, None)
