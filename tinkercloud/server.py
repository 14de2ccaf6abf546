"""The listening process: its socket, its limits, its start and its end."""

import asyncio
import fcntl
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinkercloud.config import Config
from tinkercloud.errors import ConfigError
from tinkercloud.http_connections import ConnectionLimits, Connections, LimitedProtocol
from tinkercloud.storage.database_file import unwritable

logger = logging.getLogger(__name__)

BACKLOG = 2048  # a client opens hundreds of connections at once (wire specification, section 1)
KEEP_ALIVE_S = 75
GRACE_S = 3  # how long open requests may take to end after Ctrl-C
MAX_HEAD_BYTES = 64 * 1024
FULL_COLLECTION_EVERY = 50
"""Collections of the middle generation to each full one; Python makes one in ten. One takes 40 ms
where 300 clients are connected, and every request waits for it; what it finds is little."""
OTHER_FILES = 256  # descriptors that are no connections: the database, models, engines
LOCK_FILE = "server.lock"


def listen(config: Config) -> socket.socket:
    """A bound socket; ConfigError when the address is taken or not this machine's."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # Named as TCP: asyncio turns Nagle's algorithm off only where it is, and with it on, every
    # answer written in two pieces waits 40 ms for the client's delayed acknowledgement.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((config.host, config.port))
        # At once, so that a second server fails here and not after loading its models.
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port}: {reason}; "
            "choose another with --host and --port (--port 0: any free one)"
        ) from error
    bound.setblocking(False)
    return bound


@contextmanager
def sole_owner(data_dir: Path) -> Generator[None]:
    """ConfigError while another server has the folder: it would empty that one's cache of versions;
    and for one that cannot be written. The lock ends with the process, however that ends."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(data_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise unwritable(data_dir, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another server has the data folder {data_dir}; stop that one, or choose another "
                "folder with --data-dir"
            ) from None
        except OSError as error:  # some file systems of networks
            logger.warning("%s cannot be locked: start one server on it only: %s", data_dir, error)
        yield
    finally:
        os.close(descriptor)


def base_url(bound: socket.socket) -> str:
    """The URL for clients on this machine."""
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(frozen=True, slots=True)
class Hooks:
    """ready: the application serves; an error ends the server, with the error. stopping: the
    server stops; end what requests wait for, so that held polls are answered and their connections
    close; False: nothing that runs can end by itself."""

    ready: Callable[[], Awaitable[None]]
    stopping: Callable[[bool], Awaitable[None]]


def run(app: ASGIApp, config: Config, bound: socket.socket, hooks: Hooks) -> None:
    """Serve until SIGINT or SIGTERM. ConfigError when the application refuses to start with one;
    what the hook `ready` raises, after an orderly end."""
    raise_open_files_limit()
    watched = _StartupWatch(app)
    server = _Server(_uvicorn_config(watched, config), hooks)
    try:
        asyncio.run(server.serve(sockets=[bound]))
    except SystemExit:
        if watched.refusal is None:
            raise
        raise watched.refusal from None
    if server.failure is not None:
        raise server.failure


def raise_open_files_limit() -> None:
    """Every held poll is a connection; the usual soft limit of 1024 is soon reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            logger.warning("at most %d connections: cannot raise the limit: %s", soft, error)


def connection_limits(config: Config) -> ConnectionLimits:
    """What the settings say, within the limit of open files: where that is reached nothing else
    can be opened, checkpoints neither."""
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = config.max_connections
    if open_files != resource.RLIM_INFINITY:
        room = max(1, min(room, open_files - min(OTHER_FILES, open_files // 2)))
    return ConnectionLimits(room, config.head_timeout_s, config.body_timeout_s)


def _uvicorn_config(app: ASGIApp, config: Config) -> uvicorn.Config:
    connections = Connections(connection_limits(config))
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        loop="asyncio",
        # A class, to its type; uvicorn only calls it.
        http=cast("type[asyncio.Protocol]", partial(LimitedProtocol, connections=connections)),
        ws="none",
        lifespan="on",
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        server_header=False,
        log_level="debug" if config.log_level == "debug" else "warning",
    )


class _Server(uvicorn.Server):
    """Calls the hooks; a signal ends it without a failure."""

    def __init__(self, config: uvicorn.Config, hooks: Hooks):
        super().__init__(config)
        self._hooks = hooks
        self.failure: Exception | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # modules and routes stay for ever; to traverse them takes tens of milliseconds
        gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTION_EVERY)

    async def main_loop(self) -> None:
        ready = asyncio.create_task(self._ready(), name="ready")
        try:
            await super().main_loop()
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)

    async def _ready(self) -> None:
        try:
            await self._hooks.ready()
        except Exception as failure:  # noqa: BLE001 - raised by `run`, once all is closed
            self.failure = failure
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self.servers:
            listener.close()
        try:
            await self._hooks.stopping(self.failure is None)
        finally:
            await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and not self.started:
            sys.exit(128 + sig)  # asked twice while the application was still starting
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


class _StartupWatch:
    """Passes everything through; keeps the ConfigError that ended the start, without its stack."""

    def __init__(self, app: ASGIApp):
        self._app = app
        self.refusal: ConfigError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        held: list[dict[str, Any]] = []

        async def pass_on(message: Message) -> None:
            # Starlette reports the failure, stack and all, before it lets the exception go.
            if message["type"] == "lifespan.startup.failed":
                held.append(dict(message))
            else:
                await send(message)

        try:
            await self._app(scope, receive, pass_on)
        except ConfigError as refusal:
            self.refusal = refusal
            await send({"type": "lifespan.startup.failed", "message": ""})
        except BaseException:  # only a ConfigError is shown without its stack
            for message in held:
                await send(message)
            raise
