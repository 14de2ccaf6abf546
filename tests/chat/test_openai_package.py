"""OpenAI's own package against a server: what docs/doors.md says works."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
import tinker
from openai import OpenAI
from pydantic import BaseModel

from tests.chat.live_server import MODEL, LiveServer, live_server
from tests.waiting import LIMIT_S

MESSAGES: Any = [{"role": "user", "content": "How is the weather in Zürich?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]
BOUNDED: Any = {
    "type": "object",
    "properties": {
        "place": {"enum": ["Zürich", "Bern"]},
        "day": {"$ref": "#/$defs/day"},
    },
    "required": ["place", "day"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "boolean"}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Zürich"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("openai")) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[OpenAI]:
    server.backend.script.clear()
    server.backend.requests.clear()
    with openai_client(server, "ann") as client:
        yield client


def openai_client(server: LiveServer, user: str) -> OpenAI:
    key = server.keys.get(user, user)
    return OpenAI(base_url=server.openai_url, api_key=key, max_retries=0)


def test_models_are_listed_and_found(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()][:2] == ["fake/tiny", MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_chat_is_answered(client: OpenAI, server: LiveServer) -> None:
    server.backend.script.append("It rains 🙂.")
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.choices[0].message.content == "It rains 🙂."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens == len(server.backend.requests[0].prompt)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_a_chat_is_streamed(client: OpenAI, server: LiveServer) -> None:
    server.backend.script.append("It rains 🙂 in Zürich.")
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == "It rains 🙂 in Zürich."
    assert len([piece for piece in pieces if piece]) > 5
    assert not any("\ufffd" in piece for piece in pieces)
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 5


def test_tools_are_called_and_their_results_come_back(client: OpenAI, server: LiveServer) -> None:
    server.backend.script += [f"Let me look.\n{CALL}\n{CALL}", "It rains."]
    first = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me look."
    assert message.tool_calls is not None and len(message.tool_calls) == 2
    call: Any = message.tool_calls[0]
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"place": "Zürich"}
    assert len({c.id for c in message.tool_calls}) == 2
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    repeated: Any = message.model_dump(exclude_none=True)
    second = client.chat.completions.create(
        model=MODEL, messages=[*MESSAGES, repeated, result], tools=TOOLS
    )
    assert second.choices[0].message.content == "It rains."
    prompt = server.backend.prompts()[1]
    assert '{"name": "weather", "arguments": {"place": "Zürich"}}' in prompt
    assert "<|im_start|>tool\nrain<|im_end|>" in prompt


def test_tool_calls_are_streamed_as_they_are_written(client: OpenAI, server: LiveServer) -> None:
    server.backend.script.append(f"Let me look.\n{CALL}")
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final: Any = stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.delta") > 3
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.choices[0].message.content == "Let me look."
    function = final.choices[0].message.tool_calls[0].function
    assert (function.name, json.loads(function.arguments)) == ("weather", {"place": "Zürich"})


def test_a_stream_that_is_closed_ends_its_sample(client: OpenAI, server: LiveServer) -> None:
    server.backend.script.append("one two three " * 100)
    server.backend.cancelled.clear()
    server.backend.pause_s = 0.01
    try:
        with client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True) as stream:
            assert next(chunk for chunk in stream if chunk.choices[0].delta.content)
        assert server.backend.cancelled.wait(LIMIT_S)
    finally:
        server.backend.pause_s = 0.0


def test_reasoning_is_apart_from_the_answer(client: OpenAI, server: LiveServer) -> None:
    server.backend.script += ["<think>\nhm, rain?\n</think>\n\nIt rains."] * 2
    answer: Any = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("hm, rain?", "It rains.")
    chunks: Any = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thought == "hm, rain?"
    assert "".join(delta.content or "" for delta in deltas) == "It rains."


@pytest.mark.parametrize("seed", range(3))
def test_a_seeded_chat_has_the_tokens_and_logprobs_of_the_tinker_sdk(
    client: OpenAI, server: LiveServer, seed: int
) -> None:
    more = {"return_token_ids": True}
    params: Any = {"max_tokens": 20, "seed": seed, "temperature": 0.6, "top_p": 0.9}
    fields: Any = {"model": MODEL, "messages": MESSAGES, "n": 2, "logprobs": True, **params}
    answer: Any = client.chat.completions.create(**fields, extra_body=more)
    service = tinker.ServiceClient(base_url=server.url, api_key=server.keys["ann"])
    sampler = service.create_sampling_client(base_model=MODEL).result()
    prompt = tinker.types.ModelInput.from_ints(answer.prompt_token_ids)
    drawn = sampler.sample(prompt, 2, tinker.types.SamplingParams(**params)).result()
    service.close("success").result()
    for choice, sequence in zip(answer.choices, drawn.sequences, strict=True):
        assert choice.token_ids == list(sequence.tokens)
        scored = [token.logprob for token in choice.logprobs.content]
        assert scored == list(sequence.logprobs or ())


def test_parallel_tool_calls_false_gives_one_call(client: OpenAI, server: LiveServer) -> None:
    server.backend.script.append(f"{CALL}\n{CALL}")
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=TOOLS, parallel_tool_calls=False
    )
    assert len(answer.choices[0].message.tool_calls or []) == 1


def test_tool_choice_none_shows_the_model_no_tools(client: OpenAI, server: LiveServer) -> None:
    server.backend.script.append(CALL)
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice="none"
    )
    assert answer.choices[0].message.tool_calls is None
    assert "weather" not in server.backend.prompts()[0].partition("Zürich")[0].replace(
        "the weather", ""
    )


def bounded_tool(name: str) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": BOUNDED}}


@pytest.mark.parametrize("seed", range(4))
def test_tool_choice_required_gives_a_call_by_the_tool_s_schema(client: OpenAI, seed: int) -> None:
    """No text is written for the model here: the grammar alone makes a random one call a tool."""
    tools = [bounded_tool("weather"), bounded_tool("rain")]
    fields: Any = {"model": MODEL, "messages": MESSAGES, "tools": tools, "seed": seed}
    answer = client.chat.completions.create(**fields, tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls or []
    function = getattr(call, "function")  # noqa: B009 - of a union
    assert answer.choices[0].finish_reason == "tool_calls"
    assert not answer.choices[0].message.content
    assert function.name in ("weather", "rain")
    arguments = json.loads(function.arguments)
    assert arguments["place"] in ("Zürich", "Bern") and arguments["day"] in (True, False)
    with client.chat.completions.stream(**fields, tool_choice="required") as stream:
        streamed: Any = stream.get_final_completion()
    assert streamed.choices[0].message.tool_calls[0].function.arguments == function.arguments


def test_a_named_tool_is_called(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        tools=[bounded_tool("weather"), bounded_tool("rain")],
        tool_choice={"type": "function", "function": {"name": "rain"}},
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert getattr(call, "function").name == "rain"  # noqa: B009 - of a union


class Weather(BaseModel):
    place: Literal["Zürich", "Bern"]
    rains: bool


def test_response_format_json_schema_gives_what_parses(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Weather, seed=2
    )
    assert answer.choices[0].message.parsed is not None
    assert answer.choices[0].message.parsed.place in ("Zürich", "Bern")


def test_response_format_json_object_is_a_grammar_of_any_object(
    client: OpenAI, server: LiveServer
) -> None:
    client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=3
    )
    grammar = server.backend.requests[0].grammar
    assert grammar is not None and json.loads(grammar.text) == {"type": "object"}


def test_a_schema_that_cannot_be_enforced_is_refused(client: OpenAI) -> None:
    schema: Any = {"type": "object", "minProperties": 3, "not": {"required": ["a"]}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(
                model=MODEL, messages=MESSAGES, response_format=form, stream=stream
            )


def test_n_and_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=3, max_tokens=5, logprobs=True, top_logprobs=2, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def test_max_tokens_is_the_reason_of_an_answer_that_is_cut_off(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=4, seed=1
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 4


def test_a_stop_string_ends_the_answer(client: OpenAI, server: LiveServer) -> None:
    server.backend.script.append("one two three")
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, stop=["wo t", "zzz"])
    assert answer.choices[0].message.content == "one t"
    assert answer.choices[0].finish_reason == "stop"


def test_an_answer_that_was_begun_is_continued(client: OpenAI, server: LiveServer) -> None:
    server.backend.script.append("two three")
    begun: Any = [*MESSAGES, {"role": "assistant", "content": "one "}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    client.chat.completions.create(model=MODEL, messages=begun, extra_body=more)
    assert server.backend.prompts()[0].endswith("<|im_start|>assistant\none ")


def test_a_checkpoint_is_its_owner_s_alone(client: OpenAI, server: LiveServer) -> None:
    path = server.checkpoint("ann", "of-openai")
    answer = client.chat.completions.create(model=path, messages=MESSAGES, max_tokens=3)
    assert answer.model == path
    assert path in [model.id for model in client.models.list()]
    with openai_client(server, "bob") as bob:
        assert path not in [model.id for model in bob.models.list()]
        with pytest.raises(openai.NotFoundError, match="is not found"):
            bob.chat.completions.create(model=path, messages=MESSAGES, max_tokens=3)
        with pytest.raises(openai.NotFoundError):
            bob.models.retrieve(path)


def test_a_completion_is_answered_and_streamed(client: OpenAI) -> None:
    fields: Any = {"model": MODEL, "prompt": "The café", "max_tokens": 12, "seed": 3}
    whole = client.completions.create(**fields)
    pieces = [c.choices[0].text for c in client.completions.create(**fields, stream=True)]
    assert "".join(pieces) == whole.choices[0].text


def test_a_wrong_key_raises_authentication_error(server: LiveServer) -> None:
    with (
        openai_client(server, "tml-wrong") as client,
        pytest.raises(openai.AuthenticationError, match="API key"),
    ):
        client.models.list()


def test_an_unknown_model_raises_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    assert "served: fake/tiny, chatty" in str(caught.value)


def test_a_refused_field_raises_bad_request_with_its_name(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, logit_bias={"5": 1})
    assert caught.value.param == "logit_bias"


def test_responses_are_refused_with_the_way_out(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="chat/completions"):
        client.responses.create(model=MODEL, input="hello")
