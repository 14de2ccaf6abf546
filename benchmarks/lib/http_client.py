"""The HTTP client of benchmarks that have many requests underway.

httpcore goes over all connections of a pool for each of them when a request begins or ends: with
128 at once that took 1.5 s of a processor for 256 requests, which shares the cores with what is
measured. So requests go in turns to pools of a few connections each.
"""

from collections.abc import Mapping
from itertools import cycle

import httpx

NUM_POOLS = 32
MAX_CONNECTIONS = 64  # of each


class Pools(httpx.AsyncBaseTransport):
    def __init__(self) -> None:
        limits = httpx.Limits(
            max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS
        )
        self._pools = [
            httpx.AsyncHTTPTransport(limits=limits, trust_env=False) for _ in range(NUM_POOLS)
        ]
        self._turns = cycle(self._pools)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await next(self._turns).handle_async_request(request)

    async def aclose(self) -> None:
        for pool in self._pools:
            await pool.aclose()


def http_client(
    url: str, timeout_s: float, headers: Mapping[str, str] | None = None
) -> httpx.AsyncClient:
    """Of a server on this machine: no proxy of the environment's is asked."""
    return httpx.AsyncClient(
        base_url=url, headers=headers, timeout=timeout_s, trust_env=False, transport=Pools()
    )
