"""Drafts of somebody else are verified: by equality with what the model samples itself."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.harness import Api, serving
from tests.chat.model_folder import write_model_folder
from tinkercloud.config import ModelSource

PROMPT = "The naïve café"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    source = ModelSource("chatty", write_model_folder(tmp_path / "chatty"))
    async with serving(tmp_path / "data", models=(source,)) as api:
        yield api


async def verify(api: Api, drafted: list[int], status: int = 200, **fields: Any) -> dict[str, Any]:
    body = {"model": "chatty", "prompt": PROMPT, "drafted": drafted, "seed": 2} | fields
    answer = await api.http.post("/oai/api/v1/verify", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def plain(api: Api, **fields: Any) -> tuple[list[int], list[int], list[float]]:
    """Tokens of the prompt; a sample, and its log-probabilities."""
    body = {"model": "chatty", "prompt": PROMPT, "max_tokens": 12, "seed": 2} | fields
    body |= {"logprobs": 0, "return_token_ids": True}
    answer = await api.http.post("/oai/api/v1/completions", json=body)
    choice = answer.json()["choices"][0]
    return choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"]["token_logprobs"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_a_verdict_is_the_beginning_of_the_plain_sample(api: Api, temperature: float) -> None:
    """With a wrong token at each place, and with none."""
    _, sampled, logprobs = await plain(api, temperature=temperature)
    for wrong in range(len(sampled)):
        drafted = sampled[:-1]
        if wrong < len(drafted):
            drafted[wrong] += 1 if drafted[wrong] == 0 else -1
        verdict = await verify(api, drafted, temperature=temperature)
        assert verdict["accepted"] == wrong
        assert verdict["next_token"] == sampled[wrong]
        assert verdict["tokens"] == sampled[: wrong + 1]
        assert verdict["logprobs"] == logprobs[: wrong + 1]


async def test_rounds_of_wrong_drafts_are_the_plain_sample(api: Api) -> None:
    """Noise is keyed by position: each round goes on where the last one ended."""
    prompt, sampled, _ = await plain(api)
    tokens: list[int] = []
    while len(tokens) < len(sampled):
        drafted = [*sampled[len(tokens) : len(tokens) + 2], 0, 0]
        tokens += (await verify(api, drafted, prompt=[*prompt, *tokens]))["tokens"]
    assert tokens[: len(sampled)] == sampled


async def test_without_a_draft_the_next_token_comes(api: Api) -> None:
    _, sampled, _ = await plain(api)
    verdict = await verify(api, [])
    assert (verdict["accepted"], verdict["tokens"]) == (0, sampled[:1])
    assert verdict["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"drafted": [-1]}, "drafted"),
        ({"drafted": [10**6]}, "drafted"),
        ({"drafted": [0] * 129}, "drafted"),
        ({"stop": "x"}, "stop"),
        ({"n": 2}, "n"),
        ({"stream": True}, "stream"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"prompt": ""}, "prompt"),
    ],
)
async def test_what_cannot_be_verified_is_refused_by_its_name(
    api: Api, fields: dict[str, Any], named: str
) -> None:
    asked = {"drafted": [1]} | fields
    assert (await verify(api, status=400, **asked))["error"]["param"] == named


async def test_a_draft_is_trained_for_those_who_see_the_whole_server(tmp_path: Path) -> None:
    source = ModelSource("chatty", write_model_folder(tmp_path / "chatty"))
    answers = {}
    for users in ("", "ann"):
        data_dir = tmp_path / f"data-{users}"
        async with serving(data_dir, models=(source,), metrics_users=users) as api:
            await api.as_user("bob").session()  # where there is one user, it sees everything
            answer = await api.http.post("/oai/api/v1/train_draft", json={"model": "chatty"})
            answers[users] = (answer.status_code, answer.json()["error"]["message"])
    assert answers[""][0] == 403
    assert "metrics_users" in answers[""][1]
    assert answers["ann"] == (400, "this backend trains no drafts")
