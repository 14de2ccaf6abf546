"""SGLang's router: one address in front of the engines, which are added and removed."""

import asyncio
import logging
import subprocess
import sys
from pathlib import Path

import httpx

from tinkercloud.cluster.rollout.engine import free_port, port_was_taken
from tinkercloud.config import thread_environment, with_engine_key
from tinkercloud.errors import EngineDied

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
_CALL_TIMEOUT_S = 30.0
_ALIVE_TIMEOUT_S = 2.0
_POLL_S = 0.1
_ATTEMPTS = 3
_HEALTH_INTERVAL_S = 30


class RolloutRouter:
    """The router process of one model's engines; ends with this process."""

    def __init__(self, host: str, log_path: Path, key: str):
        self._host = host
        self._key = key
        self._headers = {"authorization": f"Bearer {key}"}
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self.url = ""

    async def start(self) -> None:
        """Raises EngineDied with the end of its log."""
        for _ in range(_ATTEMPTS):
            # Between the choice of a port and its bind, another process may have taken it.
            if await self._started(free_port(), free_port()):
                return
            if not port_was_taken(self._log_path, self._log_start):
                break
        log = self._log_path.read_text(errors="replace")[-4000:]
        raise EngineDied(f"SGLang's router did not start; the end of its log:\n{log}")

    async def _started(self, port: int, metrics: int) -> bool:
        self.url = f"http://{self._host}:{port}"
        options = [
            *("--host", self._host, "--port", str(port)),
            *("--prometheus-host", self._host, "--prometheus-port", str(metrics)),
            *("--policy", "cache_aware", "--log-level", "warn"),
            # The manager decides whether an engine serves, and calls `add` and `remove`.
            *("--health-check-interval-secs", str(_HEALTH_INTERVAL_S)),
        ]
        # Not in a thread: one whose caller is cancelled would start a process that nobody ends.
        self._spawn(options)
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while self._running() and asyncio.get_running_loop().time() < deadline:
            if await self._alive() and self._running():
                return True
            await asyncio.sleep(_POLL_S)
        await self.stop()
        return False

    def _spawn(self, options: list[str]) -> None:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        guard = [sys.executable, "-m", "tinkercloud.cluster.gpus.process_guard"]
        router = [sys.executable, "-m", "tinkercloud.cluster.rollout.router_process"]
        with self._log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [*guard, *router, *options],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=with_engine_key(thread_environment(), self._key),
            )

    def _running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def _alive(self) -> bool:
        try:
            async with httpx.AsyncClient(timeout=_ALIVE_TIMEOUT_S) as http:
                return (await http.get(f"{self.url}/liveness")).status_code == 200
        except httpx.HTTPError:
            return False

    async def add(self, url: str) -> None:
        """Returns once requests may be sent to it. Raises EngineDied."""
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        async with self._client() as http:
            try:
                worker = {"url": url, "api_key": self._key}
                answer = await http.post(f"{self.url}/workers", json=worker)
                while answer.status_code < 400 and not (await self._ids(http)).get(url):
                    if asyncio.get_running_loop().time() > deadline:
                        break
                    await asyncio.sleep(_POLL_S)
                else:
                    if answer.status_code < 400:
                        return
            except httpx.HTTPError as error:
                raise EngineDied(f"SGLang's router does not answer: {error}") from error
        raise EngineDied(f"SGLang's router did not take {url}: {answer.text[:500]}")

    async def remove(self, url: str) -> None:
        """Unknown workers are ignored, and so is a router that does not answer."""
        try:
            async with self._client() as http:
                worker = (await self._ids(http)).get(url)
                if worker is not None:
                    await http.delete(f"{self.url}/workers/{worker}")
        except httpx.HTTPError as error:
            logger.warning("SGLang's router did not forget %s: %s", url, error)

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(headers=self._headers, timeout=_CALL_TIMEOUT_S)

    async def _ids(self, http: httpx.AsyncClient) -> dict[str, str]:
        """URL -> the router's id of it, of the workers that it uses."""
        workers = (await http.get(f"{self.url}/workers")).json()["workers"]
        return {w["url"]: w["id"] for w in workers if w["is_healthy"]}

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        await asyncio.to_thread(process.wait)
