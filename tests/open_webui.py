"""What Open WebUI sends to an endpoint of OpenAI's API, written down from its source (0.9: routers
openai.py and tasks.py), and what it reads of the answers."""

import json
from collections.abc import Iterator
from typing import Any

import httpx

Json = dict[str, Any]
HEADERS = {"Content-Type": "application/json", "X-OpenWebUI-User-Name": "Ada%20L."}
HISTORY = (
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is a lighthouse?"},
    {"role": "assistant", "content": "A tower with a light for ships."},
    {"role": "user", "content": "Where is the oldest one?"},
)
TASK = (
    "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.\n"
    '### Output:\nJSON format: {{ "title": "your concise title here" }}\n'
    "### Chat History:\n<chat_history>\nUSER: What is a lighthouse?\n"
    "ASSISTANT: A tower with a light for ships.\n</chat_history>"
)


def chats(model: str) -> Iterator[tuple[str, Json]]:
    """Bodies for /chat/completions, with a name each. max_tokens is the model's parameter there."""
    chat = {"model": model, "messages": list(HISTORY), "max_tokens": 24}
    streamed = chat | {"stream": True}
    yield "chat", streamed
    yield "chat that counts", streamed | {"stream_options": {"include_usage": True}}
    advanced = {"temperature": 0.7, "top_p": 0.9, "seed": 42, "stop": ["###", "\nUSER:"]}
    yield "chat with advanced parameters", streamed | advanced
    parts = [{"type": "text", "text": "What is a lighthouse?"}]
    yield "content in parts", streamed | {"messages": [{"role": "user", "content": parts}]}
    task = {"model": model, "messages": [{"role": "user", "content": TASK}], "stream": False}
    yield "title", task | {"max_completion_tokens": 24}
    yield "tags", task | {"max_tokens": 24}


async def replay(http: httpx.AsyncClient, base: str, model: str) -> None:
    """http: sends the key that Open WebUI was given. base: the endpoint's base URL."""
    listed = _json(await http.get(f"{base}/models", headers=HEADERS))
    assert model in [entry["id"] for entry in listed["data"]]
    for name, body in chats(model):
        response = await http.post(f"{base}/chat/completions", json=body, headers=HEADERS)
        assert response.status_code == 200, (name, response.text)
        if body["stream"]:
            content, reason, usage = _streamed(response)
            assert bool(usage) or "stream_options" not in body, name
        else:
            (choice,) = _json(response)["choices"]
            content, reason = choice["message"]["content"], choice["finish_reason"]
        assert reason in ("stop", "length"), name
        # Without a seed a sample may end with its first token.
        assert content or (reason == "stop" and "seed" not in body), name


def _json(response: httpx.Response) -> Json:
    assert response.status_code == 200, response.text
    return response.json()


def _streamed(response: httpx.Response) -> tuple[str, str, Json]:
    """The text of all deltas, why they ended, and the usage where a chunk has it."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    content, reason, usage = "", "", {}
    for line in lines:
        chunk = json.loads(line.removeprefix("data: "))
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            reason = choice.get("finish_reason") or reason
    return content, reason, usage
