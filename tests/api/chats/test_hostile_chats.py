"""Bodies of chats that are wrong in odd ways: answered or refused, never the server's failure."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.harness import Api, serving
from tests.chat.model_folder import write_model_folder
from tinkercloud.config import ModelSource

DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
VALUES: list[Any] = [
    None, 0, -1, 2**70, 1e308, True, "", "x", "\u0000", [], {}, [None], [[]], [{}], {"a": 1},
    {"type": "text"}, [{"type": "text"}], [{"type": "text", "text": 5}], [{"type": {}}],
    [{"type": [1]}],
    [{"type": "tool_result", "content": 5}], [{"type": "tool_use", "name": "f", "input": 5}],
    DEEP,
]  # fmt: skip
CALL = {"id": 5, "type": "function", "function": {"name": "f", "arguments": None}}
FIELDS = {
    "openai": (
        *("messages", "tools", "tool_choice", "response_format", "stop", "n", "max_tokens"),
        *("logprobs", "top_logprobs", "seed", "stream_options", "chat_template_kwargs", "model"),
        *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "parallel_tool_calls"),
        *("continue_final_message", "reasoning_effort", "modalities", "stream"),
    ),
    "anthropic": (
        *("messages", "tools", "tool_choice", "output_config", "stop_sequences", "max_tokens"),
        *("system", "thinking", "temperature", "top_p", "top_k", "seed", "model", "stream"),
    ),
}
URLS = {"openai": "/oai/api/v1/chat/completions", "anthropic": "/anthropic/api/v1/messages"}


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    source = ModelSource("chatty", write_model_folder(tmp_path / "chatty"))
    async with serving(tmp_path / "data", models=(source,)) as api:
        yield api


async def status_of(api: Api, kind: str, **fields: Any) -> int:
    body: dict[str, Any] = {"model": "chatty", "max_tokens": 2}
    body |= {"messages": [{"role": "user", "content": "Hi"}]} | fields
    content = json.dumps(body)
    headers = {"content-type": "application/json"}
    response = await api.http.post(URLS[kind], content=content, headers=headers)
    if response.status_code != 200:
        assert response.json()["error"]["message"], content
    return response.status_code


@pytest.mark.parametrize(
    ("kind", "field"), [(kind, field) for kind in FIELDS for field in FIELDS[kind]]
)
async def test_a_field_of_an_odd_value_is_taken_or_refused(api: Api, kind: str, field: str) -> None:
    for value in VALUES:
        assert await status_of(api, kind, **{field: value}) in (200, 400, 404), value


@pytest.mark.parametrize("kind", sorted(URLS))
@pytest.mark.parametrize("field", ["role", "content", "tool_calls", "tool_call_id", "name"])
async def test_a_message_of_an_odd_value_is_taken_or_refused(
    api: Api, kind: str, field: str
) -> None:
    for role in ("assistant", "tool"):
        for value in (*VALUES, [CALL], [{"function": {"name": "f", "arguments": "{"}}]):
            messages = [{"role": role, "content": "x", field: value}]
            assert await status_of(api, kind, messages=messages) in (200, 400), value


@pytest.mark.parametrize("kind", sorted(URLS))
@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"null", b'{"model": "\\ud800"}', b"\xff"])
async def test_a_body_that_is_no_request_is_refused(api: Api, kind: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = await api.http.post(URLS[kind], content=body, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


async def refusal(api: Api, kind: str, body: bytes) -> str:
    headers = {"content-type": "application/json"}
    response = await api.http.post(URLS[kind], content=body, headers=headers)
    assert response.status_code == 400
    return response.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
async def test_where_a_body_stops_being_json_is_said(api: Api, kind: str) -> None:
    text = await refusal(api, kind, b'{"model": "chatty", ')
    assert text.startswith("the body is not JSON: ")
    assert text.endswith("line 1 column 21 (char 20)")


@pytest.mark.parametrize(
    ("kind", "choice"),
    [
        ("openai", "required"),
        ("openai", {"type": "function", "function": {"name": "sub"}}),
        ("anthropic", {"type": "any"}),
        ("anthropic", {"type": "tool", "name": "sub"}),
    ],
)
async def test_a_choice_without_its_tool_is_refused_with_the_tools(
    api: Api, kind: str, choice: Any
) -> None:
    body: dict[str, Any] = {"model": "chatty", "max_tokens": 2, "tool_choice": choice}
    body["messages"] = [{"role": "user", "content": "Hi"}]
    text = await refusal(api, kind, json.dumps(body).encode())
    assert text.endswith("tools: none, and without them no call is made")


async def test_a_tool_without_its_function_is_refused_for_that(api: Api) -> None:
    body: dict[str, Any] = {"model": "chatty", "tools": [{"type": "function"}]}
    body["messages"] = [{"role": "user", "content": "Hi"}]
    text = await refusal(api, "openai", json.dumps(body).encode())
    assert text == "tools.0.function must be an object with a name"


@pytest.mark.parametrize(
    ("prefix", "path"), [("/oai/api/v1", "/embeddings"), ("/anthropic/api/v1", "/files")]
)
async def test_a_path_that_is_not_served_is_refused_with_those_that_are(
    api: Api, prefix: str, path: str
) -> None:
    response = await api.http.post(f"{prefix}{path}", json={})
    assert response.status_code == 404
    message = response.json()["error"]["message"]
    assert path in message
    assert "/models" in message
