"""OpenAI's and Anthropic's packages against a server on SmolLM2's real weights, beside Tinker's."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI
from smolagents import LogLevel, OpenAIModel, Tool, ToolCallingAgent

from tests.e2e.clients import MODEL, Client
from tests.serving import QUIET, ROOT, Server

MESSAGES: Any = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Write one line about a café, with an emoji."},
]
SAMPLED: Any = {"max_tokens": 24, "seed": 11, "temperature": 0.8, "top_p": 0.9}


@pytest.fixture(scope="module")
def server(float32_server: Server) -> Server:
    return float32_server


@pytest.fixture(scope="module")
def openai(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.base_url}/oai/api/v1", api_key=server.api_key) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=f"{server.base_url}/anthropic/api", api_key=server.api_key) as client:
        yield client


def chat(openai: OpenAI, **fields: Any) -> Any:
    body: Any = {"model": MODEL, "messages": MESSAGES, **SAMPLED} | fields
    return openai.chat.completions.create(**body, extra_body={"return_token_ids": True})


def anthropic_fields(model: str) -> Any:
    """The same request in Anthropic's form."""
    system, user = MESSAGES
    # newer versions of the package leave these to `extra_body`
    more = {name: SAMPLED[name] for name in ("temperature", "top_p", "seed")}
    fields = {"model": model, "max_tokens": SAMPLED["max_tokens"], "extra_body": more}
    return fields | {"system": system["content"], "messages": [user]}


def anthropic_text(anthropic: Anthropic, model: str) -> str:
    (block,) = anthropic.messages.create(**anthropic_fields(model)).content
    return block.text


def test_a_seeded_chat_has_the_tokens_and_logprobs_of_the_tinker_api(
    openai: OpenAI, official: Client
) -> None:
    answer = chat(openai, n=2, logprobs=True)
    drawn = official.sample(official.base_sampler(), answer.prompt_token_ids, 2, **SAMPLED)
    for choice, sequence in zip(answer.choices, drawn, strict=True):
        assert choice.token_ids == list(sequence.tokens)
        scored = [token.logprob for token in choice.logprobs.content]
        assert scored == list(sequence.logprobs)


def test_the_prompt_is_that_of_the_tokenizer_s_chat_template(
    openai: OpenAI, official: Client
) -> None:
    tokenizer = official.model().get_tokenizer()
    expected = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    answer = chat(openai, max_tokens=1)
    assert answer.prompt_token_ids == expected
    assert answer.usage.prompt_tokens == len(expected)


def test_a_stream_comes_in_pieces_and_is_the_whole_answer(openai: OpenAI) -> None:
    whole = chat(openai).choices[0].message.content
    chunks = list(chat(openai, stream=True))
    pieces = [
        c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content
    ]
    assert "".join(pieces) == whole
    assert len(pieces) > 1


def test_both_apis_give_the_same_text(openai: OpenAI, anthropic: Anthropic) -> None:
    with anthropic.messages.stream(**anthropic_fields(MODEL)) as stream:
        streamed = "".join(stream.text_stream)
    assert streamed == anthropic_text(anthropic, MODEL) == chat(openai).choices[0].message.content


def test_the_beginning_of_a_conversation_is_counted_as_cached(openai: OpenAI) -> None:
    long = [{"role": "user", "content": "one two three " * 60}]
    chat(openai, messages=long)
    again = chat(openai, messages=long)
    assert again.usage.prompt_tokens_details.cached_tokens > 100


def test_a_checkpoint_answers_while_its_model_trains_on(
    openai: OpenAI, anthropic: Anthropic, official: Client
) -> None:
    model = official.model()
    tokenizer = model.get_tokenizer()
    data = [official.supervised(tokenizer.encode("a copper coin left in the rain"))]
    official.train(model, data)
    path = model.save_weights_for_sampler("door").result().path
    live = model.save_weights_and_get_sampling_client().result()
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            official.train(model, data)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        by_path = chat(openai, model=path, logprobs=True)
        by_anthropic = anthropic_text(anthropic, path)
        both = chat(openai, model=f"{MODEL};{path}", logprobs=True)
    finally:
        stop.set()
        thread.join()
    assert path in [listed.id for listed in openai.models.list()]
    scored = [token.logprob for token in by_path.choices[0].logprobs.content]
    assert [token.logprob for token in both.choices[0].logprobs.content] == scored
    assert by_anthropic == by_path.choices[0].message.content
    drawn = official.sample(live, by_path.prompt_token_ids, 1, **SAMPLED)[0]
    assert by_path.choices[0].token_ids == list(drawn.tokens)
    assert scored == list(drawn.logprobs)
    assert [token.logprob for token in chat(openai, logprobs=True).choices[0].logprobs.content] != (
        scored
    )


def test_a_prompt_is_scored_by_echo(openai: OpenAI, official: Client) -> None:
    text = "The first light over the harbour"
    answer = openai.completions.create(
        model=MODEL, prompt=text, echo=True, max_tokens=0, logprobs=1
    )
    tokenizer = official.model().get_tokenizer()
    prompt = official.prompt(tokenizer.encode(text))
    expected = official.base_sampler().compute_logprobs(prompt).result()
    scored = answer.choices[0].logprobs
    assert answer.choices[0].text == text
    assert scored is not None and scored.token_logprobs == expected


def test_a_tool_using_agent_runs_on_real_weights(server: Server) -> None:
    """smolagents asks for a call at each step, which the grammar of its tools' schemas gives; the
    system message has the tools, since this model's template has no place for them."""
    places: list[str] = []

    class Weather(Tool):
        name = "weather"
        description = "The weather of a city"
        inputs = {  # noqa: RUF012 - smolagents wants it so
            "city": {"type": "string", "description": "The city", "enum": ["Bern", "Basel"]}
        }
        output_type = "string"

        def forward(self, city: str) -> str:
            places.append(city)
            return "rain"

    base_url = f"{server.base_url}/oai/api/v1"
    model = OpenAIModel(MODEL, base_url, server.api_key, seed=3, max_tokens=80, temperature=0.0)
    agent = ToolCallingAgent(
        [Weather()],
        model,
        instructions="Call weather first.",
        max_steps=2,
        verbosity_level=LogLevel.OFF,
    )
    answer = agent.run("How is the weather in Bern? Call the tool weather.")
    calls = [
        call for step in agent.memory.steps for call in getattr(step, "tool_calls", None) or []
    ]
    assert calls and all(call.name in ("weather", "final_answer") for call in calls)
    assert places and set(places) <= {"Bern", "Basel"}
    assert answer is not None


def test_a_talk_at_the_terminal_is_the_chat_of_the_api(server: Server, openai: OpenAI) -> None:
    """With drafts and without the text is the same."""
    content = "Write one line about a café."
    fields: Any = {"model": MODEL, "max_tokens": 16, "temperature": 0.0}
    messages: Any = [{"role": "user", "content": content}]
    expected = openai.chat.completions.create(messages=messages, **fields).choices[0].message
    run = subprocess.run(
        [sys.executable, "-m", "tinkercloud", "chat", "--max-tokens", "16", "--temperature", "0"],
        cwd=ROOT,
        env={**QUIET, "TINKER_BASE_URL": server.base_url, "TINKER_API_KEY": server.api_key},
        input=f"{content}\n/stats\n/eval\n",
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert expected.content is not None
    assert expected.content.strip() in run.stdout
    assert "tokens/s" in run.stdout
    assert "[the same text; " in run.stdout
