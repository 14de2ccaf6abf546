"""gRPC connections to workers: keys and certificates, for both ends."""

import hmac
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from tinkercloud.addresses import Address, read_key
from tinkercloud.errors import ConfigError

MAX_MESSAGE_BYTES = 32 * 1024**2
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
SERVER_OPTIONS = (
    *KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.so_reuseport", 0),
)
KEY_HEADER = "authorization"


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """key_file: holds the worker's key; None: it asks for none. ca_file: certificates (PEM) of who
    signed the worker's; None: the connection is not encrypted."""

    key_file: Path | None = None
    ca_file: Path | None = None

    def check(self) -> None:
        """Raises ConfigError where a file cannot be read."""
        self.metadata()
        if self.ca_file is not None:
            _read(self.ca_file, "certificates")

    def channel(self, address: Address) -> grpc.Channel:
        """Raises ConfigError where a file cannot be read."""
        if self.ca_file is None:
            return grpc.insecure_channel(str(address), options=KEEPALIVE)
        credentials = grpc.ssl_channel_credentials(_read(self.ca_file, "certificates"))
        return grpc.secure_channel(str(address), credentials, options=KEEPALIVE)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Raises ConfigError where the key cannot be read."""
        if self.key_file is None:
            return ()
        return ((KEY_HEADER, f"Bearer {read_key(self.key_file)}"),)


@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """key: what clients have to send; None: nothing. certificate_file, private_key_file: PEM."""

    key: str | None = None
    certificate_file: Path | None = None
    private_key_file: Path | None = None

    def check(self, address: Address) -> None:
        """Raises ConfigError where anybody on the network could use the worker."""
        if (self.certificate_file is None) != (self.private_key_file is None):
            raise ConfigError("--tls-certificate and --tls-key go together")
        if self.key is None and not address.is_loopback:
            raise ConfigError(
                f"refusing to listen on {address} without a key: write one into a file and name it "
                "with --key-file, or listen on 127.0.0.1 and use a tunnel (ssh -L)"
            )

    @property
    def is_encrypted(self) -> bool:
        return self.certificate_file is not None

    def listen(self, server: grpc.Server, address: Address) -> int:
        """The port, another than asked for where that was 0. Raises ConfigError."""
        try:
            if self.certificate_file is None or self.private_key_file is None:
                port = server.add_insecure_port(str(address))
            else:
                pair = (
                    _read(self.private_key_file, "private key"),
                    _read(self.certificate_file, "certificate"),
                )
                port = server.add_secure_port(str(address), grpc.ssl_server_credentials([pair]))
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: {error}") from None
        if not port:
            raise ConfigError(f"cannot listen on {address}: is another process there?")
        return port


def grpc_server(security: ServerSecurity, max_connections: int) -> grpc.Server:
    """Each connection has a thread of its own; one more than `max_connections` is refused."""
    interceptors: list[grpc.ServerInterceptor] = []
    if security.key is not None:
        interceptors.append(_KeyCheck(security.key))
    return grpc.server(
        ThreadPoolExecutor(max_connections, thread_name_prefix="connection"),
        interceptors=interceptors,
        options=SERVER_OPTIONS,
        maximum_concurrent_rpcs=max_connections,
    )


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the {what} in {path}: {error.strerror}") from None


class _KeyCheck(grpc.ServerInterceptor):
    def __init__(self, key: str):
        self._expected = f"Bearer {key}".encode()
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)
        self._unary_refusal = grpc.unary_unary_rpc_method_handler(_refuse)

    def intercept_service(
        self, continuation: Callable[[Any], Any], handler_call_details: Any
    ) -> Any:
        sent = dict(handler_call_details.invocation_metadata).get(KEY_HEADER, "")
        if isinstance(sent, str) and hmac.compare_digest(sent.encode(), self._expected):
            return continuation(handler_call_details)
        handler = continuation(handler_call_details)
        is_stream = handler is not None and handler.request_streaming
        return self._refusal if is_stream else self._unary_refusal


def _refuse(_request: object, context: grpc.ServicerContext) -> None:
    context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "this worker wants its key; name the file that holds it with --key-file, "
        "for a server with --draft-remote-key-file",
    )
