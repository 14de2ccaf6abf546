"""One signed question to a webhook, and its reward.

Where it goes is the operator's list's, at every attempt: the name is resolved once and connected to
by that address, redirects and proxies of the environment are not followed, and addresses that
answer for the machine's own network (link-local, where clouds have their metadata) are refused.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import json
import math
import socket
import time
from collections.abc import Awaitable, Callable
from urllib.parse import SplitResult

import httpx

from tinkercloud.errors import InvalidRequest
from tinkercloud.services.captures.webhook_hosts import WebhookHosts

SIGNATURE_HEADER = "X-Tinkercloud-Signature"
TIMEOUT_S = 60.0
MAX_QUESTION_BYTES = 8 * 1024**2
MAX_ANSWER_BYTES = 64 * 1024

Resolve = Callable[[str, int], Awaitable[str]]


class WebhookFailed(Exception):
    """No reward came of an attempt; the text says why."""


def signature(secret: str, timestamp: int, body: bytes) -> str:
    """Of the header: the receiver computes the same from its secret, the time and the body."""
    digest = hmac.new(secret.encode(), b"%d." % timestamp + body, hashlib.sha256)
    return f"t={timestamp},v1={digest.hexdigest()}"


async def resolved(host: str, port: int) -> str:
    """The first address of a host. Raises OSError."""
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return str(addresses[0][4][0])


class WebhookSender:
    def __init__(self, hosts: WebhookHosts, resolve: Resolve = resolved):
        self._hosts = hosts
        self._resolve = resolve

    async def ask(self, url: str, secret: str, question: object) -> float:
        """The reward. Raises WebhookFailed."""
        try:
            parts = self._hosts.require(url)
        except InvalidRequest as error:
            raise WebhookFailed(str(error)) from None
        body = json.dumps(question).encode()
        if len(body) > MAX_QUESTION_BYTES:
            raise WebhookFailed(f"the trajectory has more than {MAX_QUESTION_BYTES} bytes")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return _reward(await self._post(parts, secret, body))
        except TimeoutError:
            raise WebhookFailed(f"no answer within {TIMEOUT_S:g} s") from None
        except (httpx.HTTPError, OSError) as error:
            raise WebhookFailed(f"no answer: {error!r}"[:500]) from None

    async def _post(self, parts: SplitResult, secret: str, body: bytes) -> bytes:
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        address = ipaddress.ip_address(await self._resolve(host, port))
        if isinstance(address, ipaddress.IPv6Address):
            address = address.ipv4_mapped or address
        if address.is_link_local or address.is_multicast or address.is_unspecified:
            raise WebhookFailed(f"{host} is at {address}, which is not asked")
        at = f"[{address}]" if address.version == 6 else str(address)
        timestamp = int(time.time())
        headers = {
            "Host": parts.netloc,
            "Content-Type": "application/json",
            SIGNATURE_HEADER: signature(secret, timestamp, body),
        }
        target = parts._replace(netloc=f"{at}:{port}").geturl()
        async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S) as client:
            request = client.build_request(
                *("POST", target),
                content=body,
                headers=headers,
                extensions={"sni_hostname": host},  # its certificate is that of the name
            )
            response = await client.send(request, stream=True)
            try:
                return await _answer(response)
            finally:
                await response.aclose()


async def _answer(response: httpx.Response) -> bytes:
    if response.status_code != 200:
        raise WebhookFailed(f"it answered with status {response.status_code}, not 200")
    content = bytearray()
    async for piece in response.aiter_bytes():
        content += piece
        if len(content) > MAX_ANSWER_BYTES:
            raise WebhookFailed(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
    return bytes(content)


def _reward(content: bytes) -> float:
    try:
        value = json.loads(content)["reward"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise WebhookFailed('its answer is not {"reward": NUMBER}') from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise WebhookFailed("its reward is not a finite number")
    return float(value)
