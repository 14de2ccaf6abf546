"""Streams that wait are kept alive; one key has so many answers underway; tokens are billed."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.api.harness import Api, serving
from tests.chat.model_folder import write_model_folder
from tinkercloud import event_stream
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.config import Config, ModelSource
from tinkercloud.core.types import OnTokens, SampleOutput, SampleRequest
from tinkercloud.errors import EngineDied
from tinkercloud.services.chats import request_slots

MESSAGES = [{"role": "user", "content": "Hello"}]
URLS = {"openai": "/oai/api/v1/chat/completions", "anthropic": "/anthropic/api/v1/messages"}


class GatedBackend(FakeBackend):
    """Samples wait for `gate`; then they fail with `fault`, where there is one."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.gate, self.waiting = asyncio.Event(), asyncio.Event()
        self.fault: Exception | None = None

    async def sample(
        self, version: str, request: SampleRequest, on_tokens: OnTokens | None = None
    ) -> SampleOutput:
        self.waiting.set()
        await self.gate.wait()
        if self.fault is not None:
            raise self.fault
        return await super().sample(version, request, on_tokens)


def gated(folder: Path) -> GatedBackend:
    source = ModelSource("chatty", write_model_folder(folder / "chatty"))
    return GatedBackend(Config(data_dir=folder, models=(source,)))


async def several_heartbeats() -> None:
    """As many sleeps as long as those between them, on the same event loop: what holds it up, holds
    up both."""
    for _ in range(20):
        await asyncio.sleep(event_stream.HEARTBEAT_S)


def ask(api: Api, kind: str, **fields: Any) -> Any:
    body = {"model": "chatty", "messages": MESSAGES, "max_tokens": 5} | fields
    return api.http.post(URLS[kind], json=body)


@pytest.mark.parametrize(
    ("kind", "heartbeat"), [("openai", ": still here\n\n"), ("anthropic", "event: ping\n")]
)
async def test_a_stream_that_waits_has_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, heartbeat: str
) -> None:
    monkeypatch.setattr(event_stream, "HEARTBEAT_S", 0.01)
    backend = gated(tmp_path)
    async with serving(tmp_path / "data", backend=backend) as api:
        asked = asyncio.create_task(ask(api, kind, stream=True))
        await backend.waiting.wait()
        await several_heartbeats()
        backend.gate.set()
        text = (await asked).text
    assert text.startswith(heartbeat)
    assert text.count(heartbeat) >= 3


@pytest.mark.parametrize("kind", sorted(URLS))
async def test_an_engine_that_dies_before_the_first_token_is_503(tmp_path: Path, kind: str) -> None:
    backend = gated(tmp_path)
    backend.fault = EngineDied("the engine died")
    backend.gate.set()
    async with serving(tmp_path / "data", backend=backend) as api:
        for stream in (False, True):
            response = await ask(api, kind, stream=stream)
            assert response.status_code == 503
            assert response.json()["error"]["message"] == "the engine died"


@pytest.mark.parametrize("kind", sorted(URLS))
async def test_an_engine_that_dies_underway_is_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(event_stream, "HEARTBEAT_S", 0.01)
    backend = gated(tmp_path)
    backend.fault = EngineDied("the engine died")
    async with serving(tmp_path / "data", backend=backend) as api:
        asked = asyncio.create_task(ask(api, kind, stream=True))
        await backend.waiting.wait()
        await several_heartbeats()
        backend.gate.set()
        response = await asked
    assert response.status_code == 200
    assert '"message": "the engine died"' in response.text.split("\n\n")[-2]


@pytest.mark.parametrize("kind", sorted(URLS))
async def test_one_key_has_so_many_answers_underway_and_another_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(request_slots, "MAX_REQUESTS", 1)
    backend = gated(tmp_path)
    async with serving(tmp_path / "data", backend=backend) as api:
        first = asyncio.create_task(ask(api, kind))
        await backend.waiting.wait()
        refused = await ask(api, kind)
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        second = asyncio.create_task(ask(api.as_user("bob"), kind))
        backend.gate.set()
        assert [(await asked).status_code for asked in (first, second)] == [200, 200]
        assert (await ask(api, kind)).status_code == 200


async def test_tokens_of_answers_are_billed(tmp_path: Path) -> None:
    backend = gated(tmp_path)
    backend.gate.set()
    async with serving(tmp_path / "data", backend=backend) as api:
        usage = (await ask(api, "openai", n=2)).json()["usage"]
        await ask(api.as_user("bob"), "anthropic")
        now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        window = [(now + timedelta(hours=hours)).isoformat() for hours in (-1, 2)]
        events = await api.get(
            "billing/usage/events", starting_on=window[0], ending_before=window[1]
        )
    counts: dict[str, int] = {}
    for event in events.json()["data"]:
        info = event["event_info"]
        counts[info["type"]] = counts.get(info["type"], 0) + info["token_count"]
    prompt, sampled = usage["prompt_tokens"], usage["completion_tokens"]
    assert counts == {"sampling_prefill": prompt, "sampling_sample": sampled}
