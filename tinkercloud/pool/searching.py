"""Finding workers on the local network: every address of it is asked, at the port of workers."""

import ipaddress
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
from pydantic import ValidationError

from tinkercloud.errors import ConfigError
from tinkercloud.pool.pool_file import Gpu

MAX_ADDRESSES = 4096
AT_ONCE = 64
TIMEOUT_S = 1.0
MAX_ANSWER_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class FoundWorker:
    """devices: as it names them. key_wanted: it says nothing of them without its key."""

    host: str
    port: int
    devices: tuple[str, ...] = ()
    key_wanted: bool = False

    @property
    def place(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def spec(self) -> str:
        """As `pool init --worker` takes it."""
        return ",".join([self.place, *self.devices])


def search(network: str, port: int, key: str | None = None) -> list[FoundWorker]:
    """network: as 192.168.1.0/24, or one address. key: sent to those alone that ask for one.

    Raises ConfigError where it is no local network, or too large a one."""
    addresses = _addresses(network)
    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=0)
    with (
        httpx.Client(timeout=TIMEOUT_S, trust_env=False, limits=limits) as client,
        ThreadPoolExecutor(AT_ONCE) as executor,
    ):
        answers = executor.map(lambda host: _ask(client, host, port, key), addresses)
        return [worker for worker in answers if worker is not None]


def _addresses(network: str) -> list[str]:
    try:
        parsed = ipaddress.ip_network(network, strict=False)
    except ValueError:
        raise ConfigError(f"{network!r} is no network; write it as 192.168.1.0/24") from None
    if not parsed.is_private and not parsed.is_link_local:
        raise ConfigError(f"{network} is not a local network; only those are searched")
    if parsed.num_addresses > MAX_ADDRESSES:
        raise ConfigError(
            f"{network} has {parsed.num_addresses} addresses; {MAX_ADDRESSES} are searched at most "
            "(a /20): name a part of it"
        )
    hosts = [str(host) for host in parsed.hosts()]
    return hosts or [str(parsed.network_address)]


def _ask(client: httpx.Client, host: str, port: int, key: str | None) -> FoundWorker | None:
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/health"
    try:
        status, answer = _get(client, url)
        if status != 401:
            return _worker_of(host, port, answer) if status == 200 else None
        if "worker wants its key" not in str(answer.get("error")):
            return None
        if key is not None:
            status, answer = _get(client, url, {"Authorization": f"Bearer {key}"})
            if status == 200:
                return _worker_of(host, port, answer)
        return FoundWorker(host, port, key_wanted=True)
    except (httpx.HTTPError, ValueError):
        return None


def _get(
    client: httpx.Client, url: str, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, object]]:
    """Raises ValueError for what no worker answers."""
    content = bytearray()
    with client.stream("GET", url, headers=headers) as response:
        for piece in response.iter_bytes():
            content += piece
            if len(content) > MAX_ANSWER_BYTES:
                raise ValueError("the answer is too long")
    answer = json.loads(content)
    if not isinstance(answer, dict):
        raise ValueError("the answer is no object")
    return response.status_code, answer


def _worker_of(host: str, port: int, answer: dict[str, object]) -> FoundWorker | None:
    devices = answer.get("devices")
    if not isinstance(devices, list) or not devices:
        return None
    try:
        gpus = [Gpu(device=device["device"]) for device in devices]
    except (KeyError, TypeError, ValidationError):
        return None
    return FoundWorker(host, port, tuple(gpu.device for gpu in gpus))
