"""The proxy's API in this process, between OpenAI's client and scripted servers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.chat.model_folder import write_model_folder
from tests.open_webui import replay
from tests.proxy.bench import GREEDY, QUESTION, Made, client
from tinkercloud.chat.text_model import Conversation
from tinkercloud.errors import ConfigError
from tinkercloud.proxy.service import ProxyLimits


@pytest.mark.parametrize("kind", ["tinkercloud", "vllm", "vllm-cached"])
@pytest.mark.parametrize("draft", ["vllm", "llamacpp"])
async def test_completions_are_the_target_s_own(bench: Made, kind: str, draft: str) -> None:
    """A drafter that is asked by text changes nothing either."""
    made = bench(kind, draft)
    async with made.proxy() as http:
        ai = client(http)
        whole = await ai.completions.create(prompt="One day", **GREEDY)
        stream = await ai.completions.create(prompt="One day", stream=True, **GREEDY)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        status = (await http.get("/status")).json()
    assert whole.choices[0].text == text == made.alone("One day", 24)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert whole.choices[0].finish_reason == "length"
    assert status["requests"]["speculated"] == 2
    assert status["speculation"]["rounds"] > 0
    assert made.said[0].endswith(f"({kind})")
    assert f"by {'tokens' if draft == 'vllm' else 'text'}" in made.said[1]
    assert ("--enable-scale-out" in made.said[-1]) == (kind == "vllm")


async def test_chats_are_rendered_by_the_target_s_template(bench: Made) -> None:
    made = bench()
    target = made.target
    prompt = target.text.prompt(Conversation(({"role": "user", "content": "Hello"},)))
    alone = target.text_of(target.model.alone(prompt, 24))
    async with made.proxy() as http:
        ai = client(http)
        whole = await ai.chat.completions.create(messages=QUESTION, **GREEDY)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await ai.chat.completions.create(messages=QUESTION, **options, **GREEDY)
        chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert whole.choices[0].message.content == alone
    assert text == alone
    assert chunks[-1].usage == whole.usage


async def test_a_stop_string_ends_an_answer_and_its_count(bench: Made) -> None:
    made = bench()
    text = made.alone("One day", 24)
    stop = text[10:12]
    async with made.proxy() as http:
        answer = await client(http).completions.create(prompt="One day", stop=stop, **GREEDY)
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens < 24


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 2}, "n"),
        ({"temperature": 0.5}, "temperature"),
        ({"temperature": 1, "top_p": 0.5}, "temperature"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"logprobs": True}, "logprobs"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"max_tokens": 499}, "max_tokens"),
    ],
)
async def test_what_cannot_be_verified_is_passed_on(
    bench: Made, fields: dict[str, Any], named: str
) -> None:
    made = bench()
    body = GREEDY | {"messages": QUESTION} | fields
    async with made.proxy() as http:
        answer = await http.post("/v1/chat/completions", json=body)
        status = (await http.get("/status")).json()
    assert answer.json()["passed"] == body
    assert status["requests"]["passed_on"] == {named: 1}


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("ollama", {}, "gives no scores"),
        ("vllm", {"tokenizer": None}, "--tokenizer"),
        ("vllm", {"drafts": ()}, "no --draft"),
    ],
)
async def test_why_every_request_is_passed_on_is_said(
    bench: Made, kind: str, changes: dict[str, Any], reason: str
) -> None:
    made = bench(kind)
    async with made.proxy(**changes) as http:
        await client(http).chat.completions.create(messages=QUESTION, **GREEDY)
        assert reason in (await http.get("/status")).json()["passes_on"]
    assert reason in made.said[0]


async def test_open_webui_is_answered(bench: Made) -> None:
    made = bench("tinkercloud")
    async with made.proxy() as http:
        await replay(http, "/v1", "scripted")
        status = (await http.get("/status")).json()
    assert status["requests"]["passed_on"] == {} and status["speculation"]["rounds"] > 0


async def test_a_llama_server_that_drafts_by_itself_is_said_to(bench: Made) -> None:
    made = bench("llamacpp")
    made.target.drafts = True
    async with made.proxy() as http:
        await client(http).chat.completions.create(messages=QUESTION, **GREEDY)
    assert made.said[0].endswith("drafts by itself, and verifies each draft in one pass")


async def test_a_llama_server_that_could_draft_is_said_to(bench: Made) -> None:
    made = bench("llamacpp")
    async with made.proxy() as http:
        await client(http).chat.completions.create(messages=QUESTION, **GREEDY)
    assert made.said[0].endswith(
        "gives no scores of drafted tokens; llama-server drafts by itself where it is started so: "
        "in a pool's file by `draft: suffix`"
    )


async def test_another_vocabulary_is_found_at_the_start(bench: Made, tmp_path: Path) -> None:
    made = bench()
    other = write_model_folder(tmp_path / "other", size=300)
    async with made.proxy(tokenizer=other):
        assert "not those of --tokenizer" in made.said[0]


async def test_a_drafter_that_is_down_is_done_without(bench: Made) -> None:
    made = bench()
    made.draft.failing = True
    async with made.proxy() as http:
        answer = await client(http).completions.create(prompt="One day", **GREEDY)
        status = (await http.get("/status")).json()
    assert answer.choices[0].text == made.alone("One day", 24)
    assert "no drafts from" in made.said[1]
    assert not status["drafters"][0]["up"]


async def test_errors_of_the_target_are_errors(bench: Made) -> None:
    made = bench()
    async with made.proxy() as http:
        made.target.failing = True
        with pytest.raises(openai.InternalServerError, match="it fails"):
            await client(http).completions.create(prompt="One day", **GREEDY)
    with pytest.raises(ConfigError, match="target"):
        async with made.proxy():
            pass


async def test_every_route_but_health_wants_the_key(bench: Made) -> None:
    made = bench()
    async with made.proxy(key="secret") as http:
        for path in ("/v1/models", "/v1/models/scripted", "/status", "/metrics", "/else"):
            assert (await http.get(path)).status_code == 401
            assert (await http.get(path, headers={"authorization": "Bearer x"})).status_code == 401
        for path in ("/v1/completions", "/v1/chat/completions"):
            assert (await http.post(path, content=b"{")).status_code == 401
        assert (await http.get("/health")).status_code == 200
        models = await client(http, "secret").models.list()
    assert [model.id for model in models.data] == ["scripted"]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (json.dumps(GREEDY | {"model": "other", "prompt": "a"}).encode(), 404),
        (json.dumps(GREEDY | {"max_tokens": 10**6, "prompt": "a"}).encode(), 400),
        (json.dumps(GREEDY | {"temperature": -1, "prompt": "a"}).encode(), 400),
        (json.dumps(GREEDY | {"prompt": "a" * 2000}).encode(), 413),
        (json.dumps(GREEDY | {"prompt": "ab " * 100}).encode(), 400),
    ],
)
async def test_requests_beyond_the_limits_are_refused(
    bench: Made, content: bytes, status: int
) -> None:
    limits = ProxyLimits(max_body_bytes=1000, max_output_tokens=100, max_prompt_tokens=50)
    async with bench().proxy(limits=limits) as http:
        answer = await http.post("/v1/completions", content=content)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


async def test_a_stream_that_is_closed_ends_what_is_asked(bench: Made) -> None:
    made = bench()
    async with made.proxy() as http:
        body = GREEDY | {"prompt": "One day", "stream": True, "max_tokens": 400}
        app = http._transport.app  # type: ignore[attr-defined]
        request = json.dumps(body).encode()
        bodies = [{"type": "http.request", "body": request, "more_body": False}]
        began = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if bodies:
                return bodies.pop()
            await began.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body":
                began.set()

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        await app({**scope, "query_string": b"", "client": ("t", 1)}, receive, send)
        num_asked = len(made.target.requests)
        await asyncio.sleep(0.05)
        status = (await http.get("/status")).json()
    assert len(made.target.requests) == num_asked
    assert status["requests"]["running"] == 0
    verified = status["speculation"]["rounds"]
    assert 0 < verified < 100


async def test_metrics_count_tokens_and_drafts(bench: Made) -> None:
    made = bench()
    async with made.proxy() as http:
        await client(http).completions.create(prompt="One day", **GREEDY)
        lines = (await http.get("/metrics")).text.splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    name = "tinkercloud_proxy_tokens_total"
    sampled = [float(found[f'{name}{{kind="{kind}"}}']) for kind in ("verified", "plain")]
    assert sum(sampled) == 24
    assert float(found[f'{name}{{kind="accepted"}}']) > 0
    assert found['tinkercloud_proxy_requests_total{way="speculated"}'] == "1.0"
