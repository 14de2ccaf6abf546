"""This process's connection to Ray: to a running cluster, or to one that it starts itself."""

import asyncio
import logging
import math
import signal
import threading
import warnings
from typing import Any

from tinkercloud.cluster.gpus.placement import CPUS_PER_BUNDLE
from tinkercloud.config import ClusterConfig, quiet_ray
from tinkercloud.core.plan import ClusterShape
from tinkercloud.errors import ConfigError

logger = logging.getLogger(__name__)

_CPU_MODELS = 4  # for which a Ray that we start has bundles: without GPUs these are virtual


class RaySession:
    """Connects at `start`, disconnects at `stop`; a connection that existed before stays."""

    def __init__(self, config: ClusterConfig):
        self._config = config
        self._is_ours = False

    async def start(self) -> ClusterShape:
        """The GPUs that each model may use. Raises ConfigError."""
        quiet_ray()
        import ray

        if not ray.is_initialized():
            self._connect(ray)
            self._is_ours = True
        try:
            return await asyncio.to_thread(self._shape, ray)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the actors and placement groups that this process still has."""
        import ray

        if self._is_ours:
            self._is_ours = False
            await asyncio.to_thread(ray.shutdown)

    def _connect(self, ray: Any) -> None:
        # ray.init replaces the driver's SIGTERM handler by one that exits at once (its docstring
        # says so): the server would not finish open requests.
        in_main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGTERM) if in_main else None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ray.init(**self._options())
        except (ConnectionError, ValueError, RuntimeError) as error:
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
