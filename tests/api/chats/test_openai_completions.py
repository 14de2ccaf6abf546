"""Completions: texts and token ids, several prompts, echo, log-probabilities, streams."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.harness import Api, serving
from tests.chat.model_folder import write_model_folder
from tinkercloud.config import ModelSource

URL = "/oai/api/v1/completions"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    source = ModelSource("chatty", write_model_folder(tmp_path / "chatty"))
    async with serving(tmp_path / "data", models=(source,)) as api:
        yield api


async def complete(api: Api, **fields: Any) -> httpx.Response:
    body = {"model": "chatty", "prompt": "The naïve café", "max_tokens": 20, "seed": 2} | fields
    return await api.http.post(URL, json=body)


async def whole(api: Api, **fields: Any) -> dict[str, Any]:
    response = await complete(api, **fields)
    assert response.status_code == 200, response.text
    return response.json()


async def texts(api: Api, **fields: Any) -> list[str]:
    return [choice["text"] for choice in (await whole(api, **fields))["choices"]]


async def streamed(api: Api, **fields: Any) -> dict[int, str]:
    blocks = (await complete(api, stream=True, **fields)).text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    joined: dict[int, str] = {}
    for block in blocks[:-2]:
        for choice in json.loads(block.removeprefix("data: "))["choices"]:
            joined[choice["index"]] = joined.get(choice["index"], "") + choice["text"]
    return joined


async def test_a_text_and_its_tokens_are_the_same_prompt(api: Api) -> None:
    answer = await whole(api, return_token_ids=True)
    ids = answer["choices"][0]["prompt_token_ids"]
    assert await texts(api, prompt=ids) == await texts(api)
    assert answer["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("echo", [False, True])
async def test_the_deltas_of_all_prompts_are_the_whole_answers(api: Api, echo: bool) -> None:
    fields = {"prompt": ["one", "café 🙂", "two"], "n": 2, "stop": "an", "echo": echo}
    expected = await texts(api, **fields)
    assert len(expected) == 6
    assert await streamed(api, **fields) == dict(enumerate(expected))
    assert [text.startswith("one") for text in expected[:2]] == [echo, echo]


async def test_several_prompts_are_answered_as_each_alone(api: Api) -> None:
    assert await texts(api, prompt=["one", "two"], n=2) == [
        *await texts(api, prompt="one", n=2),
        *await texts(api, prompt="two", n=2),
    ]


async def test_logprobs_are_those_of_the_tinker_sample(api: Api) -> None:
    choice = (await whole(api, logprobs=2, return_token_ids=True))["choices"][0]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": choice["prompt_token_ids"]}]}
    sampler = await api.sampler(await api.session(), base_model="chatty")
    params = {"max_tokens": 20, "seed": 2}
    drawn = await api.result(await api.sample(sampler, prompt=prompt, sampling_params=params))
    assert choice["token_ids"] == drawn.sequences[0].tokens.tolist()
    assert choice["logprobs"]["token_logprobs"] == drawn.sequences[0].logprobs.tolist()
    assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
    assert all(1 <= len(top) <= 2 for top in choice["logprobs"]["top_logprobs"])


async def test_echo_scores_the_prompt_without_sampling(api: Api) -> None:
    answer = await whole(api, echo=True, max_tokens=0, logprobs=1, return_token_ids=True)
    choice = answer["choices"][0]
    prompt = choice["prompt_token_ids"]
    sampler = await api.sampler(await api.session(), base_model="chatty")
    body = {"chunks": [{"type": "encoded_text", "tokens": prompt}]}
    drawn = await api.result(await api.sample(sampler, prompt=body, prompt_logprobs=True))
    assert choice["text"] == "The naïve café"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == drawn.prompt_logprobs.tolist()[1:]
    assert choice["logprobs"]["text_offset"][0] == 0
    assert (choice["token_ids"], choice["finish_reason"]) == ([], "length")
    assert answer["usage"]["completion_tokens"] == 0


async def test_a_model_without_a_tokenizer_completes_numbers(api: Api) -> None:
    by_text = await texts(api, model="fake/tiny", prompt="1 2 3")
    assert by_text == await texts(api, model="fake/tiny", prompt=[1, 2, 3])
    assert [str(int(number)) for number in by_text[0].split()] == by_text[0].split()
    refused = await complete(api, model="fake/tiny", prompt="words")
    assert "no tokenizer" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"suffix": "after"},
        {"best_of": 4},
        {"max_tokens": 0},
        {"prompt": []},
        {"logit_bias": {"1": 2}},
        {"prompt": ["a"] * 100, "n": 2},
        {"echo": True, "logprobs": 1, "stream": True},
        {"presence_penalty": 3},
        {"min_p": 2},
        {"temperature": -1},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_what_is_not_served_is_refused_by_name(api: Api, fields: dict[str, Any]) -> None:
    response = await complete(api, **fields)
    assert response.status_code == 400
    assert next(iter(fields)) in response.json()["error"]["message"]


async def test_penalties_change_what_is_sampled(api: Api) -> None:
    fields = {"max_tokens": 60, "temperature": 0}
    plain = await texts(api, **fields)
    assert await texts(api, **fields, frequency_penalty=2.0, presence_penalty=2.0) != plain


async def test_ids_outside_the_vocabulary_are_refused(api: Api) -> None:
    response = await complete(api, prompt=[10**6])
    assert response.status_code == 400
    assert "vocabulary" in response.json()["error"]["message"]
