"""Chat completions over HTTP: whole and as a stream, errors in OpenAI's form, two users."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.api.harness import Api, serving
from tests.chat.model_folder import write_model_folder
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.chat.requests import ChatRequest, SamplingOptions
from tinkercloud.chat.text_model import Conversation, TextModel
from tinkercloud.chat.turn import Turn, TurnHooks
from tinkercloud.config import Config, ModelSource
from tinkercloud.core.types import OnTokens, SampleOutput, SampleRequest, TokenChunk

MESSAGES = [{"role": "user", "content": "Count the owners of the café."}]


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    """A server with the model "chatty", whose folder has a tokenizer and a chat template."""
    source = ModelSource("chatty", write_model_folder(tmp_path / "chatty"))
    async with serving(tmp_path / "data", models=(source,)) as api:
        yield api


async def chat(api: Api, **fields: Any) -> httpx.Response:
    body = {"model": "chatty", "messages": MESSAGES, "max_tokens": 24, "seed": 5} | fields
    return await api.http.post("/oai/api/v1/chat/completions", json=body)


async def events(api: Api, **fields: Any) -> list[dict[str, Any]]:
    response = await chat(api, stream=True, **fields)
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def streamed_text(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(c["delta"].get("content", "") for c in choices if c["index"] == index)


async def test_an_answer_has_text_a_reason_to_end_and_counts(api: Api) -> None:
    answer = (await chat(api)).json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "chatty"
    choice = answer["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert choice["finish_reason"] in ("length", "stop")
    usage = answer["usage"]
    assert 1 <= usage["completion_tokens"] <= 24
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("seed", range(12))
async def test_the_deltas_of_a_stream_are_the_whole_answer(api: Api, seed: int) -> None:
    fields = {"seed": seed, "n": 3, "max_tokens": 40, "stop": ["an", "é"]}
    whole = (await chat(api, **fields)).json()
    chunks = await events(api, **fields, stream_options={"include_usage": True})
    for choice in whole["choices"]:
        index = choice["index"]
        text = streamed_text(chunks, index)
        assert text == choice["message"]["content"]
        assert "an" not in text and "é" not in text
        ends = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
        assert ends.count(None) == len(ends) - 3
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-1]["choices"] == []


async def test_a_seeded_answer_is_the_tinker_sample_of_the_same_prompt(api: Api) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "n": 2}
    answer = (await chat(api, **fields, temperature=0.7)).json()
    prompt = {"chunks": [{"type": "encoded_text", "tokens": answer["prompt_token_ids"]}]}
    params = {"max_tokens": 24, "seed": 5, "temperature": 0.7}
    sampler = await api.sampler(await api.session(), base_model="chatty")
    drawn = await api.sample(sampler, prompt=prompt, sampling_params=params, num_samples=2)
    output = await api.result(drawn)
    for choice, sequence in zip(answer["choices"], output.sequences, strict=True):
        assert choice["token_ids"] == sequence.tokens.tolist()
        scored = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert scored == sequence.logprobs.tolist()
        assert all(len(token["top_logprobs"]) == 2 for token in choice["logprobs"]["content"])


async def test_a_stream_without_usage_has_none(api: Api) -> None:
    assert all("usage" not in chunk for chunk in await events(api))


async def test_a_model_without_a_template_refuses_messages_and_says_what_to_do(api: Api) -> None:
    response = await chat(api, model="fake/tiny")
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]
    assert "/completions" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "field",
    [
        {"logit_bias": {"5": 1}},
        {"n": 0},
        {"response_format": {"type": "yaml"}},
        {"tool_choice": "required"},
        {"modalities": ["audio"]},
        {"audio": {"voice": "alloy"}},
        {"stop": [""]},
        {"functions": [{"name": "f"}]},
    ],
    ids=lambda field: next(iter(field)),
)
async def test_a_field_that_is_not_served_is_refused_by_name(
    api: Api, field: dict[str, Any]
) -> None:
    response = await chat(api, **field)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert next(iter(field)) in error["message"]


async def test_an_image_is_refused_with_the_part_that_has_it(api: Api) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    response = await chat(api, messages=[{"role": "user", "content": [part]}])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages.0.content.0"


async def test_a_number_out_of_its_bounds_is_refused_with_its_field(api: Api) -> None:
    response = await chat(api, max_tokens=0)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "max_tokens")
    assert "greater than or equal to 1" in error["message"]


async def test_unknown_fields_are_ignored(api: Api) -> None:
    assert (await chat(api, from_the_future=1)).status_code == 200


async def test_a_prompt_that_is_too_long_has_its_own_code(api: Api) -> None:
    long = [{"role": "user", "content": "one two three " * 2000}]
    response = await chat(api, messages=long)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_no_key_is_401_in_openai_s_form(api: Api) -> None:
    body = {"model": "chatty", "messages": MESSAGES}
    headers = {"X-API-Key": "", "Authorization": "Bearer tml-wrong"}
    response = await api.http.post("/oai/api/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"


async def test_another_user_s_checkpoint_and_sampler_are_not_found(api: Api) -> None:
    model_id = await api.model(base_model="chatty")
    saved = await api.ok("save_weights_for_sampler", model_id=model_id, path="mine", seq_id=1)
    path = (await api.result(saved))["path"]
    sampler = await api.sampler(model_id.split(":")[0], 7, model_path=path)
    bob = api.as_user("bob")
    for name in (path, sampler, f"chatty;{path}"):
        assert (await chat(api, model=name)).status_code == 200, name
        response = await chat(bob, model=name)
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
    assert path in [m["id"] for m in (await api.http.get("/oai/api/v1/models")).json()["data"]]
    listed = [m["id"] for m in (await bob.http.get("/oai/api/v1/models")).json()["data"]]
    assert listed == ["fake/tiny", "chatty"]


async def test_a_live_sampler_answers_with_its_own_weights_while_training_goes_on(
    api: Api,
) -> None:
    model_id = await api.model(base_model="chatty")
    await api.train(model_id, 1)
    body = {"model_id": model_id, "sampling_session_seq_id": 3, "seq_id": 3}
    saved = await api.result(await api.ok("save_weights_for_sampler", **body))
    name = saved["sampling_session_id"]
    before = (await chat(api, model=name, logprobs=True)).json()["choices"]
    await api.train(model_id, 4)
    assert (await chat(api, model=name, logprobs=True)).json()["choices"] == before
    assert (await chat(api, logprobs=True)).json()["choices"] != before


class RecordedTurns:
    """A prompt source and a listener, as a capture of an agent's turns has them."""

    def __init__(self, prompt: list[int]):
        self.tokens = prompt
        self.turns: list[Turn] = []

    async def prompt(self, conversation: Conversation, model: TextModel) -> list[int]:
        return self.tokens

    async def finished(self, turn: Turn) -> None:
        self.turns.append(turn)


async def test_a_turn_has_the_exact_tokens_of_its_prompt_and_answer(api: Api) -> None:
    recorded = RecordedTurns([5, 6, 7])
    request = ChatRequest("chatty", Conversation(tuple(MESSAGES)), SamplingOptions(2, 9, seed=3))
    hooks = TurnHooks(recorded, recorded)
    run = await api.services.chats.conversations.begin("ann", request, hooks)
    assert [event async for event in run.events()]
    (turn,) = recorded.turns
    assert (turn.user, turn.base_model, turn.model_path) == ("ann", "chatty", None)
    assert turn.prompt.tolist() == [5, 6, 7]
    assert turn.version
    for answer, sequence in zip(turn.answers, turn.output.sequences, strict=True):
        assert [token.token for token in answer.tokens] == sequence.tokens.tolist()
        assert [token.logprob for token in answer.tokens] == sequence.logprobs.tolist()
        assert answer.message["content"] == answer.text


async def test_a_turn_ends_with_the_stop_string_of_its_answer(api: Api) -> None:
    recorded = RecordedTurns([5, 6, 7])
    options = SamplingOptions(2, 200, seed=3, stops=("e",), top_logprobs=2)
    request = ChatRequest("chatty", Conversation(tuple(MESSAGES)), options)
    run = await api.services.chats.conversations.begin(
        "ann", request, TurnHooks(recorded, recorded)
    )
    assert [event async for event in run.events()]
    (turn,) = recorded.turns
    for answer, sequence in zip(turn.answers, turn.output.sequences, strict=True):
        assert (answer.finish_reason, answer.stop, sequence.stop_reason) == ("stop", "e", "stop")
        assert [token.token for token in answer.tokens] == sequence.tokens.tolist()
        assert len(sequence.logprobs) == len(sequence.tokens) < 200
        assert sequence.topk is not None
        assert sequence.topk.token_ids.shape == (len(sequence.tokens), 2)


class SlowBackend(FakeBackend):
    """Gives a token, and then nothing; says when its sample was cancelled."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.began, self.cancelled = asyncio.Event(), asyncio.Event()

    async def sample(
        self, version: str, request: SampleRequest, on_tokens: OnTokens | None = None
    ) -> SampleOutput:
        if on_tokens is not None:
            on_tokens(TokenChunk(0, np.array([9], np.int32), np.array([-1.0], np.float32)))
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        raise AssertionError


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_its_samples(tmp_path: Path, stream: bool) -> None:
    source = ModelSource("chatty", write_model_folder(tmp_path / "chatty"))
    backend = SlowBackend(Config(data_dir=tmp_path, models=(source,)))
    body = json.dumps({"model": "chatty", "messages": MESSAGES, "stream": stream}).encode()
    inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})
    async with serving(tmp_path / "data", backend=backend, models=(source,)) as api:
        headers = [(b"x-api-key", api.key.encode()), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/oai/api/v1/chat/completions"}
        scope |= {"headers": headers, "query_string": b"", "raw_path": b""}
        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        call = asyncio.create_task(api.app(scope, inbox.get, send))
        async with asyncio.timeout(10):
            await backend.began.wait()
            inbox.put_nowait({"type": "http.disconnect"})
            await call
        assert backend.cancelled.is_set()
        assert bool(b"".join(message.get("body", b"") for message in sent)) == stream
