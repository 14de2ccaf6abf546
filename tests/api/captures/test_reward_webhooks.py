"""Rewards by webhook: who is asked, how often, and what proves that the question is ours."""

import asyncio
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.api.harness import Api, serving
from tests.chat.model_folder import write_model_folder
from tinkercloud.config import ModelSource
from tinkercloud.errors import ConfigError, InvalidRequest
from tinkercloud.services.captures import reward_webhooks, webhook_sender
from tinkercloud.services.captures.webhook_hosts import WebhookHosts
from tinkercloud.services.captures.webhook_sender import (
    SIGNATURE_HEADER,
    WebhookFailed,
    WebhookSender,
)

QUESTION = {"role": "user", "content": "Count the owners of the café."}


class Grader:
    """An HTTP server that notes what it is asked and answers with the next of `answers`, or the
    last of them: (status, body, further header lines)."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, bytes, str]] = [(200, b'{"reward": 0.75}', "")]
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.port = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        self.requests.append((headers, await reader.readexactly(int(headers["content-length"]))))
        status, body, more = self.answers[0]
        self.answers = self.answers[1:] or self.answers
        head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\nconnection: close\r\n{more}"
        writer.write(f"{head}\r\n".encode() + body)
        await writer.drain()
        writer.close()


@pytest.fixture
async def grader() -> AsyncIterator[Grader]:
    grader = Grader()
    server = await asyncio.start_server(grader.handle, "127.0.0.1", 0)
    grader.port = server.sockets[0].getsockname()[1]
    yield grader
    server.close()
    await server.wait_closed()


@asynccontextmanager
async def asking(folder: Path, grader: Grader) -> AsyncIterator[Api]:
    source = ModelSource("chatty", write_model_folder(folder / "chatty"))
    hosts = f"localhost:{grader.port},127.0.0.1:{grader.port}"
    async with serving(folder / "data", models=(source,), reward_hosts=hosts) as api:
        yield api


@pytest.fixture
async def api(tmp_path: Path, grader: Grader, monkeypatch: Any) -> AsyncIterator[Api]:
    monkeypatch.setattr(reward_webhooks, "FIRST_DELAY_S", 0.0)
    monkeypatch.setattr(reward_webhooks, "PERIOD_S", 3600.0)  # the tests sweep
    async with asking(tmp_path, grader) as api:
        yield api


async def session(api: Api, grader: Grader, **fields: Any) -> dict[str, Any]:
    url = f"http://127.0.0.1:{grader.port}/grade?x=1"
    return await api.ok("captures", **({"model": "chatty", "webhook": url} | fields))


async def ask(api: Api, where: str) -> None:
    url = f"/captures/{where}/oai/api/v1/chat/completions"
    body = {"model": "m", "messages": [QUESTION], "max_tokens": 4}
    assert (await api.http.post(url, json=body)).status_code == 200


async def trajectories(api: Api, capture_id: str) -> list[dict[str, Any]]:
    return (await api.get(f"captures/{capture_id}/trajectories")).json()["trajectories"]


async def test_a_closed_episode_gets_its_reward_from_a_signed_question(
    api: Api, grader: Grader
) -> None:
    made = await session(api, grader, metadata={"task": 7})
    capture_id, secret = made["capture_id"], made["webhook_secret"]
    await ask(api, f"{capture_id}/episodes/1")
    await ask(api, f"{capture_id}/episodes/2")
    await api.services.captures.webhooks.sweep()
    assert grader.requests == []
    await api.ok(f"captures/{capture_id}/close", episode="1")
    for _ in range(3):
        await api.services.captures.webhooks.sweep()
    ((headers, body),) = grader.requests
    found = {t["episode"]: t["reward"] for t in await trajectories(api, capture_id)}
    assert found == {"1": 0.75, "2": None}
    time, _, digest = headers[SIGNATURE_HEADER.lower()].partition(",v1=")
    signed = time.removeprefix("t=").encode() + b"." + body
    assert hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest() == digest
    question = json.loads(body)
    assert (question["capture_id"], question["metadata"]) == (capture_id, {"task": 7})
    assert [m["role"] for m in question["messages"]] == ["user", "assistant"]


async def test_an_idle_episode_is_closed_and_asked_about(api: Api, grader: Grader) -> None:
    capture_id = (await session(api, grader, idle_s=0.01))["capture_id"]
    await ask(api, f"{capture_id}/episodes/1")
    await asyncio.sleep(0.05)
    await api.services.captures.webhooks.sweep()
    (only,) = await trajectories(api, capture_id)
    assert only["reward"] == 0.75
    assert only["webhook"] == {"attempts": 1, "error": None}
    url = f"/captures/{capture_id}/episodes/1/oai/api/v1/chat/completions"
    late = await api.http.post(url, json={"model": "m", "messages": [QUESTION]})
    assert late.status_code == 410


async def test_what_was_rewarded_by_call_is_not_asked_about(api: Api, grader: Grader) -> None:
    capture_id = (await session(api, grader))["capture_id"]
    await ask(api, capture_id)
    await api.ok(f"captures/{capture_id}/rewards", value=1.0)
    await api.ok(f"captures/{capture_id}/close")
    await api.services.captures.webhooks.sweep()
    assert grader.requests == []


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((302, b"", "location: http://127.0.0.1:1/\r\n"), "status 302"),
        ((500, b"", ""), "status 500"),
        ((200, b"good", ""), "not {"),
        ((200, b'{"reward": "1"}', ""), "not a finite number"),
        ((200, b'{"reward": NaN}', ""), "not a finite number"),
        ((200, b" " * (webhook_sender.MAX_ANSWER_BYTES + 1), ""), "more than"),
    ],
    ids=["redirect", "fault", "no JSON", "a text", "NaN", "long"],
)
async def test_an_attempt_that_fails_is_repeated_and_given_up_in_the_end(
    api: Api, grader: Grader, answer: tuple[int, bytes, str], error: str
) -> None:
    grader.answers = [answer]
    capture_id = (await session(api, grader))["capture_id"]
    await ask(api, capture_id)
    await api.ok(f"captures/{capture_id}/close")
    for _ in range(reward_webhooks.MAX_ATTEMPTS + 2):
        await api.services.captures.webhooks.sweep()
    assert len(grader.requests) == reward_webhooks.MAX_ATTEMPTS
    (only,) = await trajectories(api, capture_id)
    assert only["reward"] is None
    assert error in only["webhook"]["error"]


async def test_a_later_answer_counts(api: Api, grader: Grader) -> None:
    grader.answers = [(500, b"", ""), (200, b'{"reward": -2}', "")]
    capture_id = (await session(api, grader))["capture_id"]
    await ask(api, capture_id)
    await api.ok(f"captures/{capture_id}/close")
    for _ in range(3):
        await api.services.captures.webhooks.sweep()
    (only,) = await trajectories(api, capture_id)
    assert (only["reward"], len(grader.requests)) == (-2, 2)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/grade",
        "http://127.0.0.1/",
        "https://example.com/",
        "http://127.0.0.1.example.com:{port}/",
        "http://user@127.0.0.1:{port}/",
        "http://user:word@127.0.0.1:{port}/",
        "ftp://127.0.0.1:{port}/",
        "http://[::1]:{port}/",
        "http://0.0.0.0:{port}/",
        "http://127.1:{port}/",
        "http://127.0.0.1:{port}x/",
        "file:///etc/passwd",
    ],
)
async def test_hosts_that_are_not_on_the_operator_s_list_are_refused(
    api: Api, grader: Grader, url: str
) -> None:
    response = await api.post("captures", model="chatty", webhook=url.format(port=grader.port))
    assert response.status_code == 422
    assert "webhook" in response.text


def test_no_host_is_allowed_by_default() -> None:
    with pytest.raises(InvalidRequest, match="reward_hosts"):
        WebhookHosts.of("none").require("http://localhost:80/")


@pytest.mark.parametrize("setting", ["host", "host:x", "http://host:1", "host:1/path", "a@host:1"])
def test_a_list_of_hosts_that_cannot_be_read_stops_the_server(setting: str) -> None:
    with pytest.raises(ConfigError, match="reward_hosts"):
        WebhookHosts.of(setting)


async def test_a_name_is_resolved_once_and_reached_at_that_address(grader: Grader) -> None:
    asked: list[str] = []

    async def resolve(host: str, port: int) -> str:
        asked.append(host)
        return "127.0.0.1"

    name = f"grader.example:{grader.port}"
    sender = WebhookSender(WebhookHosts.of(name), resolve)
    assert await sender.ask(f"http://{name}/", "secret", {}) == 0.75
    assert asked == ["grader.example"]
    assert grader.requests[0][0]["host"] == name


@pytest.mark.parametrize(
    "address", ["169.254.169.254", "0.0.0.0", "224.0.0.1", "fe80::1", "::", "::ffff:169.254.1.1"]
)
async def test_a_name_that_leads_to_the_machine_s_own_network_is_not_asked(address: str) -> None:
    async def resolve(host: str, port: int) -> str:
        return address

    sender = WebhookSender(WebhookHosts.of("grader.example:80"), resolve)
    with pytest.raises(WebhookFailed, match="which is not asked"):
        await sender.ask("http://grader.example/", "secret", {})
