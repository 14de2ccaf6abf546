"""A draft worker behind gRPC."""

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from tinkercloud.speculative.remote import draft_pb2 as pb
from tinkercloud.speculative.remote.connection import Address, ServerSecurity, grpc_server
from tinkercloud.speculative.remote.messages import METHOD
from tinkercloud.speculative.remote.worker import Connection, DraftWorker

logger = logging.getLogger(__name__)

MAX_ENGINES = 32
CLOSING_S = 1.0


@dataclass(slots=True)
class DraftServer:
    """Listens until `stop`. port: the one that it got."""

    worker: DraftWorker
    port: int
    _server: grpc.Server
    _computing: threading.Thread

    @classmethod
    def start(
        cls, worker: DraftWorker, address: Address, security: ServerSecurity
    ) -> "DraftServer":
        """Raises ConfigError."""
        security.check(address)
        server = grpc_server(security, MAX_ENGINES)
        service, _, method = METHOD[1:].partition("/")
        handler = grpc.stream_stream_rpc_method_handler(
            _Calls(worker).draft,
            request_deserializer=pb.ToWorker.FromString,
            response_serializer=pb.ToEngine.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        port = security.listen(server, address)
        computing = threading.Thread(target=worker.run, name="drafts", daemon=True)
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
    def __init__(self, worker: DraftWorker):
        self._worker = worker

    def draft(
        self, messages: Iterator[pb.ToWorker], context: grpc.ServicerContext
    ) -> Iterator[pb.ToEngine]:
        connection = self._worker.open()
        logger.info("engine %d at %s", connection.number, context.peer())
        reader = threading.Thread(
            target=self._read, args=(connection, messages), name="reader", daemon=True
        )
        reader.start()
        return iter(connection.outgoing.get, None)

    def _read(self, connection: Connection, messages: Iterator[pb.ToWorker]) -> None:
        try:
            for message in messages:
                self._worker.receive(connection, message)
        except Exception as error:  # noqa: BLE001 - grpc raises the bare class when a call ends
            logger.debug("engine %d: %s", connection.number, error)
        finally:
            self._worker.receive(connection, None)
