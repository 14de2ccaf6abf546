"""Addresses of upstreams: which are taken, and which are asked."""

import asyncio
import socket
from typing import Any

import httpx
import pytest

from tinkercloud.errors import ConfigError, UpstreamAnswerInvalid, UpstreamUnreachable
from tinkercloud.proxy.upstream import PublicOnly, Upstream, UpstreamAddress


def test_an_address_has_a_url_and_may_name_a_model() -> None:
    address = UpstreamAddress.parse("https://host:8000/v1/#org/model")
    assert (address.base_url, address.model) == ("https://host:8000/v1", "org/model")
    assert address.root == "https://host:8000"
    assert UpstreamAddress.parse("http://[::1]:1/v1").model is None


@pytest.mark.parametrize("text", ["host:8000", "ftp://host", "http://", "http://a/v1?x=1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="base URL"):
        UpstreamAddress.parse(text)


def test_a_key_in_an_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="file"):
        UpstreamAddress.parse("http://user:secret@host/v1")


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, 0, 0, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)


PRIVATE = ("127.0.0.1", "10.1.2.3", "192.168.0.9", "169.254.169.254", "::1", "fd00::1", "0.0.0.0")


@pytest.mark.parametrize("address", PRIVATE)
async def test_private_addresses_are_not_asked(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor names that also have such a one."""
    resolving(monkeypatch, "93.184.216.34", address)
    inner = httpx.MockTransport(lambda _: pytest.fail("it was asked"))
    upstream = Upstream(
        UpstreamAddress("http://name.test/v1"), httpx.AsyncClient(transport=PublicOnly(inner))
    )
    with pytest.raises(UpstreamUnreachable, match="private"):
        await upstream.get("models")


async def test_a_request_goes_to_the_address_that_was_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The certificate is still that of the name."""
    resolving(monkeypatch, "93.184.216.34")
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={})

    http = httpx.AsyncClient(transport=PublicOnly(httpx.MockTransport(answer)))
    await Upstream(UpstreamAddress("https://name.test/v1"), http).get("models")
    assert asked[0].url.host == "93.184.216.34"
    assert asked[0].headers["host"] == "name.test"
    assert asked[0].extensions["sni_hostname"] == "name.test"


async def test_a_redirect_is_not_followed() -> None:
    moved = httpx.Response(302, headers={"location": "http://127.0.0.1:1/"})
    http = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: moved))
    with pytest.raises(Exception, match="302"):
        await Upstream(UpstreamAddress("http://name.test/v1"), http).get("models")


async def test_an_answer_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinkercloud.proxy.upstream.MAX_ANSWER_BYTES", 1000)
    http = httpx.AsyncClient(
        transport=httpx.MockTransport(lambda _: httpx.Response(200, content=b" " * 5000))
    )
    with pytest.raises(UpstreamAnswerInvalid, match="1000 bytes"):
        await Upstream(UpstreamAddress("http://name.test/v1"), http).get("models")
