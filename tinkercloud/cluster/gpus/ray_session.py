"""This process's connection to Ray: to a running cluster, or to one that it starts itself.

Everything that a driver has goes through the raylet, Ray's daemon, of its own machine. When that
ends, the driver's actors and placement groups are gone, and Ray reconnects nobody: the session lets
its owner forget them, and connects anew, to a new Ray where it starts one itself.
"""

import asyncio
import logging
import math
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from tinkercloud.cluster.gpus import ray_access
from tinkercloud.cluster.gpus.placement import CPUS_PER_BUNDLE
from tinkercloud.cluster.gpus.ray_link import RayLink
from tinkercloud.config import ClusterConfig, quiet_ray
from tinkercloud.errors import ConfigError
from tinkercloud.planning.plan import ClusterShape

logger = logging.getLogger(__name__)

RETRY_S = 5.0
LOST = "Ray's daemon on the server's machine (raylet) has ended"
_CPU_MODELS = 4  # for which a Ray that we start has bundles: without GPUs these are virtual


class RaySession:
    """Connects at `start`, disconnects at `stop`; a connection that existed before stays.

    forget: called once the link is lost; nothing of the lost Ray may be used after it. trouble: why
    there is no Ray just now.
    """

    def __init__(self, config: ClusterConfig, link: RayLink, forget: Callable[[], Awaitable[None]]):
        self._config = config
        self._link = link
        self._forget = forget
        self._is_ours = False
        self._watch: asyncio.Task[None] | None = None
        self.trouble: str | None = None

    async def start(self) -> ClusterShape:
        """The GPUs that each model may use. Raises ConfigError."""
        quiet_ray()
        if not _is_connected():
            address = self._config.ray_address
            access = await asyncio.to_thread(ray_access.prepare, address or "")
            logger.info("Ray %s: %s", address or "of this server", access)
            self._connect()
            self._is_ours = True
        import ray

        try:
            shape = await asyncio.to_thread(self._shape, ray)
            if self._is_ours:
                self._watch = asyncio.create_task(self._keep(await _raylet()), name="raylet")
        except BaseException:  # cancelled too: Ray is up already
            await self.stop()
            raise
        return shape

    async def stop(self) -> None:
        """End the actors and placement groups that this process still has."""
        import ray

        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._is_ours:
            self._is_ours = False
            await asyncio.to_thread(ray.shutdown)

    async def _keep(self, raylet: socket.socket) -> None:
        while True:
            await _ended(raylet)
            self.trouble = LOST
            logger.error("%s: ranks, engines and GPUs are gone", LOST)
            self._link.lose(LOST)
            await self._forget()
            raylet = await self._reconnected()
            self._link.restore()
            self.trouble = None
            logger.info("connected to Ray again")

    async def _reconnected(self) -> socket.socket:
        """Tried for ever: a Ray that is not ours must be started anew by whoever started it."""
        import ray

        while True:
            await asyncio.to_thread(ray.shutdown)
            try:
                if self._config.ray_address is not None:
                    await asyncio.to_thread(ray_access.prepare, self._config.ray_address)
                # In a thread, which takes no signal handlers: the server answers meanwhile.
                await asyncio.to_thread(self._connect)
                return await _raylet()
            except (ConfigError, OSError, StopIteration) as error:
                self.trouble = f"{LOST}, and there is no other: {error}"
                logger.warning("%s", self.trouble)
            await asyncio.sleep(RETRY_S)

    def _connect(self) -> None:
        import ray
        from ray.exceptions import RayError

        # ray.init replaces the driver's SIGTERM handler by one that exits at once (its docstring
        # says so): the server would not finish open requests.
        in_main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGTERM) if in_main else None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ray.init(**self._options())
        except (ConnectionError, ValueError, RuntimeError, RayError) as error:
            where = self._config.ray_address or "on this machine"
            raise ConfigError(f"no Ray {where}: {error}") from error
        finally:
            if before is not None:
                signal.signal(signal.SIGTERM, before)

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
        if self._config.ray_address is not None:
            return {**options, "address": self._config.ray_address}
        options |= {"address": "local", "include_dashboard": False}
        if self._config.device == "cpu":
            num_bundles = _CPU_MODELS * (self._config.gpus or 1)
            options["num_cpus"] = math.ceil(num_bundles * CPUS_PER_BUNDLE)
        return options

    def _shape(self, ray: Any) -> ClusterShape:
        config, kind = self._config, "GPU" if self._config.device == "cuda" else "CPU"
        nodes = [node["Resources"].get(kind, 0.0) for node in ray.nodes() if node["Alive"]]
        largest, total = int(max(nodes, default=0.0)), int(sum(nodes))
        if config.gpus is None and total == 0:
            raise ConfigError(
                f"Ray knows of no {kind}s; start nodes that have some, or say how many will come "
                "with --cluster-gpus"
            )
        gpus = config.gpus or total
        per_node = config.gpus_per_node or largest or gpus
        return ClusterShape(gpus, min(per_node, gpus), config.gpu_memory_bytes)


async def _raylet() -> socket.socket:
    """A connection to the raylet of this machine: it carries nothing, and ends when that ends."""
    import ray

    own_id = ray.get_runtime_context().get_node_id()
    nodes = await asyncio.to_thread(ray.nodes)
    path = next(node["RayletSocketName"] for node in nodes if node["NodeID"] == own_id)
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, path)
    except BaseException:  # cancelled too: nobody else holds the socket
        connection.close()
        raise
    return connection


async def _ended(connection: socket.socket) -> None:
    with connection, suppress(ConnectionError):
        while await asyncio.get_running_loop().sock_recv(connection, 4096):
            pass


def _is_connected() -> bool:
    """Ray reads the environment when it is imported, so it is not imported to ask this."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())
