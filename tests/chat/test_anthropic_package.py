"""Anthropic's own package against a server: what docs/doors.md says works."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from tests.chat.live_server import MODEL, LiveServer, live_server
from tests.waiting import LIMIT_S

MESSAGES: Any = [{"role": "user", "content": "How is the weather in Zürich?"}]
TOOLS: Any = [
    {
        "name": "weather",
        "description": "The weather of a place",
        "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}},
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Zürich"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("anthropic")) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[Anthropic]:
    server.backend.script.clear()
    server.backend.requests.clear()
    with anthropic_client(server, "ann") as client:
        yield client


def anthropic_client(server: LiveServer, user: str) -> Anthropic:
    key = server.keys.get(user, user)
    return Anthropic(base_url=server.anthropic_url, api_key=key, max_retries=0)


def create(client: Anthropic, **fields: Any) -> Any:
    body = {"model": MODEL, "max_tokens": 200, "messages": MESSAGES}
    return client.messages.create(**(body | fields))


def test_a_message_is_answered(client: Anthropic, server: LiveServer) -> None:
    server.backend.script.append("It rains 🙂.")
    answer = create(client, system="You are brief.")
    assert [(block.type, block.text) for block in answer.content] == [("text", "It rains 🙂.")]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.cache_read_input_tokens == 3
    assert answer.usage.input_tokens + 3 == len(server.backend.requests[0].prompt)
    assert "You are brief." in server.backend.prompts()[0]


def test_a_message_is_streamed_by_anthropic_s_events(client: Anthropic, server: LiveServer) -> None:
    server.backend.script.append("It rains 🙂 in Zürich.")
    kinds = [event.type for event in create(client, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert kinds.count("content_block_delta") > 5


def test_the_streamed_text_is_the_whole_text(client: Anthropic, server: LiveServer) -> None:
    server.backend.script.append("It rains 🙂 in Zürich.")
    with client.messages.stream(model=MODEL, max_tokens=99, messages=MESSAGES) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "It rains 🙂 in Zürich."
    assert final.stop_reason == "end_turn"
    assert final.usage.cache_read_input_tokens == 3
    assert final.usage.output_tokens > 5


def test_tools_are_called_and_their_results_come_back(
    client: Anthropic, server: LiveServer
) -> None:
    server.backend.script += [f"Let me look.\n{CALL}", "It rains."]
    first = create(client, tools=TOOLS)
    assert first.stop_reason == "tool_use"
    text, use = first.content
    assert (text.text, use.type, use.name, use.input) == (
        *("Let me look.", "tool_use"),
        *("weather", {"place": "Zürich"}),
    )
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    second = create(client, tools=TOOLS, messages=messages)
    assert second.content[0].text == "It rains."
    prompt = server.backend.prompts()[1]
    assert '{"name": "weather", "arguments": {"place": "Zürich"}}' in prompt
    assert "<|im_start|>tool\nrain<|im_end|><|im_start|>user\nAnd?<|im_end|>" in prompt


def test_tool_inputs_are_streamed_as_json_deltas(client: Anthropic, server: LiveServer) -> None:
    server.backend.script.append(f"Let me look.\n{CALL}\n{CALL}")
    fields: Any = {"model": MODEL, "max_tokens": 99, "messages": MESSAGES, "tools": TOOLS}
    with client.messages.stream(**fields) as stream:
        deltas = [event for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert len(deltas) > 3
    assert [block.type for block in final.content] == ["text", "tool_use", "tool_use"]
    uses: Any = final.content[1:]
    assert all(use.input == {"place": "Zürich"} for use in uses)
    assert final.stop_reason == "tool_use"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_tool_choice_gives_a_call_by_the_tool_s_schema(
    client: Anthropic, choice: dict[str, str]
) -> None:
    """No text is written for the model here: the grammar alone makes a random one call a tool."""
    places = {"type": "object", "properties": {"place": {"enum": ["Zürich", "Bern"]}}}
    schema = places | {"required": ["place"], "additionalProperties": False}
    tools = [TOOLS[0] | {"input_schema": schema}]
    answer = create(client, tools=tools, tool_choice=choice, max_tokens=4000)
    assert answer.stop_reason == "tool_use"
    (use,) = answer.content
    assert use.name == "weather" and use.input["place"] in ("Zürich", "Bern")


def test_an_output_format_gives_json_of_its_schema(client: Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"rains": {"type": "boolean"}},
        "required": ["rains"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "schema": schema}}
    answer = create(client, output_config=form, max_tokens=4000)
    assert json.loads(answer.content[0].text)["rains"] in (True, False)


def test_a_stop_sequence_ends_the_answer_and_is_named(
    client: Anthropic, server: LiveServer
) -> None:
    server.backend.script.append("one two three")
    answer = create(client, stop_sequences=["wo t"])
    assert answer.content[0].text == "one t"
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "wo t")


def test_max_tokens_is_the_reason_of_an_answer_that_is_cut_off(client: Anthropic) -> None:
    answer = create(client, max_tokens=4, extra_body={"seed": 1})
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 4)


def test_an_answer_that_was_begun_is_continued(client: Anthropic, server: LiveServer) -> None:
    server.backend.script.append("two three")
    messages = [*MESSAGES, {"role": "assistant", "content": "one "}]
    assert create(client, messages=messages).content[0].text == "two three"
    assert server.backend.prompts()[0].endswith("<|im_start|>assistant\none ")


def test_thinking_of_earlier_turns_is_taken(client: Anthropic, server: LiveServer) -> None:
    server.backend.script.append("yes")
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    said = {"role": "assistant", "content": [thought, {"type": "text", "text": "one"}]}
    messages = [*MESSAGES, said, *MESSAGES]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    answer = create(client, messages=messages, thinking=thinking, max_tokens=2048)
    assert answer.content[0].text == "yes"


def test_a_stream_that_is_closed_ends_its_sample(client: Anthropic, server: LiveServer) -> None:
    server.backend.script.append("one two three " * 100)
    server.backend.cancelled.clear()
    server.backend.pause_s = 0.01
    try:
        with client.messages.stream(model=MODEL, max_tokens=99, messages=MESSAGES) as stream:
            assert next(iter(stream.text_stream))
        assert server.backend.cancelled.wait(LIMIT_S)
    finally:
        server.backend.pause_s = 0.0


def test_reasoning_is_a_thinking_block(client: Anthropic, server: LiveServer) -> None:
    server.backend.script += ["<think>\nhm, rain?\n</think>\n\nIt rains."] * 2
    answer = create(client)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking == "hm, rain?"
    with client.messages.stream(model=MODEL, max_tokens=99, messages=MESSAGES) as stream:
        streamed: Any = stream.get_final_message()
    assert streamed.content[0].thinking == "hm, rain?"
    assert streamed.content[1].text == "It rains."


def test_a_checkpoint_is_its_owner_s_alone(client: Anthropic, server: LiveServer) -> None:
    path = server.checkpoint("ann", "of-anthropic")
    assert create(client, model=path, max_tokens=3).model == path
    assert path in [model.id for model in client.models.list()]
    with anthropic_client(server, "bob") as bob:
        assert path not in [model.id for model in bob.models.list()]
        with pytest.raises(anthropic.NotFoundError, match="is not found"):
            create(bob, model=path)
        with pytest.raises(anthropic.NotFoundError):
            bob.messages.count_tokens(model=path, messages=MESSAGES)


def test_tokens_are_counted(client: Anthropic, server: LiveServer) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES, tools=TOOLS)
    create(client, tools=TOOLS, max_tokens=1)
    assert counted.input_tokens == len(server.backend.requests[0].prompt)


def test_models_are_listed(client: Anthropic) -> None:
    assert [model.id for model in client.models.list()][:2] == ["fake/tiny", MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_wrong_key_raises_authentication_error(server: LiveServer) -> None:
    with (
        anthropic_client(server, "tml-wrong") as client,
        pytest.raises(anthropic.AuthenticationError, match="API key"),
    ):
        create(client)


def test_an_unknown_model_raises_not_found(client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        create(client, model="claude-9")
    assert caught.value.body["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mcp_servers", [{"type": "url"}]),
        ("stop_sequences", [""]),
        ("tools", [{"type": "web_search_20250305", "name": "web_search"}]),
        ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}]),
    ],
)
def test_what_is_not_served_is_refused_by_name(client: Anthropic, field: str, value: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(client, extra_body={field: value})
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert field in caught.value.body["error"]["message"]
