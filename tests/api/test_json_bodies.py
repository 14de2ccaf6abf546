"""Large JSON bodies: parsed in a process of their own, within limits, counted; others go on."""

import asyncio
import os
import time
from pathlib import Path

import httpx
import pytest

from tests.api.harness import Api, serving
from tinkercloud.errors import PayloadTooLarge
from tinkercloud.routers.http.json_route import MAX_JSON_BYTES, MAX_TRAINING_JSON_BYTES
from tinkercloud.services.common.bodies import parse_json
from tinkercloud.services.common.body_parser import BodyParser

MIB = 1024**2
JSON = {"content-type": "application/json"}


def brackets(num_bytes: int) -> bytes:
    """The JSON that takes longest to parse and most memory when it is parsed."""
    return b'{"prompt": [' + b"[]," * (num_bytes // 3) + b"[]]}"


async def post(api: Api, path: str, body: bytes) -> httpx.Response:
    return await api.http.post(path, content=body, headers=JSON)


async def test_others_are_answered_while_large_bodies_are_parsed(api: Api) -> None:
    """By this process's CPU time between two answers, which others on the machine do not change:
    whether on the event loop or in a thread that holds the GIL, a body parsed here counts in it."""
    body = brackets(2 * MIB)
    begun_s = time.process_time()
    parse_json(body)
    parsing_s = time.process_time() - begun_s
    sending = [asyncio.create_task(post(api, "/api/v1/asample", body)) for _ in range(4)]
    longest_s = 0.0
    while not all(task.done() for task in sending):
        begun_s = time.process_time()
        assert (await api.http.get("/healthz")).status_code == 200
        await asyncio.sleep(0.001)
        longest_s = max(longest_s, time.process_time() - begun_s)
    assert {task.result().status_code for task in sending} == {422}
    assert longest_s < 0.5 * parsing_s


async def test_a_large_body_means_what_a_small_one_does(api: Api) -> None:
    session_id = await api.session()
    sampler = await api.sampler(session_id)
    chunks = [{"type": "encoded_text", "tokens": [300] * 40_000}]
    text = await api.failure(await api.sample(sampler, prompt={"chunks": chunks}))
    assert "the prompt has 40000 tokens" in text
    messages = [{"role": "user", "content": "a" * 100_000}]
    chat = await api.http.post(
        "/oai/api/v1/chat/completions", json={"model": "nobody", "messages": messages}
    )
    assert chat.status_code == 404
    assert "nobody" in chat.json()["error"]["message"]


async def test_what_is_wrong_with_a_large_body_is_told_like_that_of_a_small_one(api: Api) -> None:
    for num_faults in (10, 30_000):
        wrong = {"chunks": [{"type": "encoded_text", "tokens": ["a"] * num_faults}]}
        refused = await api.post("asample", prompt=wrong, sampling_params={})
        assert refused.status_code == 422
        assert f"and {num_faults - 5} more" in refused.json()["detail"]
    for padding in (1, 100_000):
        refused = await post(api, "/api/v1/asample", b"[" + b" " * padding)
        assert refused.status_code == 422
        assert "the body is not JSON" in refused.json()["detail"]
        chat = await post(api, "/oai/api/v1/chat/completions", b"[" + b" " * padding)
        assert chat.status_code == 400
        assert "the body is not JSON" in chat.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "highest"),
    [("asample", MAX_JSON_BYTES), ("forward", MAX_TRAINING_JSON_BYTES)],
)
async def test_a_json_body_above_the_limit_is_refused_with_the_numbers(
    api: Api, path: str, highest: int
) -> None:
    refused = await post(api, f"/api/v1/{path}", b" " * (highest + 1))
    assert refused.status_code == 413
    assert str(highest + 1) in refused.json()["detail"]
    assert str(highest) in refused.json()["detail"]


async def test_what_is_parsed_is_counted_with_the_bodies(tmp_path: Path) -> None:
    async with serving(tmp_path, max_body_bytes=MIB, body_memory_bytes=8 * MIB) as api:
        refused = await post(api, "/api/v1/asample", brackets(MIB // 2))
        assert refused.status_code == 413
        assert "body_memory_bytes" in refused.json()["detail"]
        assert (await post(api, "/api/v1/asample", brackets(MIB // 8))).status_code == 422


def end_process(body: bytes) -> None:
    os._exit(len(body))


async def test_a_parser_that_ends_is_replaced() -> None:
    parser = BodyParser()
    for _ in range(2):
        with pytest.raises(PayloadTooLarge, match="a body of 3 bytes"):
            await parser.run(end_process, b"abc")
        assert await parser.run(parse_json, b"[1]") == [1]
    parser.close()
