"""Agents in a capture session, by the packages that they are written on: nothing but the base URL
is changed."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.chat.live_server import MODEL, LiveServer, live_server
from tinker_gmi.captures import Captures
from tinker_gmi.connection.errors import NotFoundError, UnprocessableEntityError
from tinkercloud.cli import main

QUESTION: Any = {"role": "user", "content": "What is 20 + 22?"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 20, "b": 22}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("captures")) as server:
        yield server


@pytest.fixture
def captures(server: LiveServer) -> Iterator[Captures]:
    server.backend.script.clear()
    server.backend.requests.clear()
    with Captures(server.url, server.keys["ann"]) as captures:
        yield captures


def prompts_and_samples(server: LiveServer) -> list[list[int]]:
    return [request.prompt.tolist() for request in server.backend.requests]


def assert_one_sequence(captures: Captures, capture_id: str, server: LiveServer) -> None:
    """Each prompt begins with the whole of the turn before, and the datum is the last of them."""
    captures.reward(capture_id, 1.0)
    (only,) = captures.datums(capture_id, advantages="raw")["data"]
    tokens = only["datum"]["model_input"]["chunks"][0]["tokens"]
    prompts = prompts_and_samples(server)
    assert len(prompts) == only["num_turns"] > 1
    assert [tokens[: len(prompt)] for prompt in prompts] == prompts


@pytest.mark.parametrize("stream", [False, True])
def test_openai_s_package_calls_a_tool_and_the_turns_are_one_trajectory(
    captures: Captures, server: LiveServer, stream: bool
) -> None:
    session = captures.create(model=MODEL)
    server.backend.script += [f"Let me add.\n{CALL}", "It is 42."]
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    fields: Any = {"model": "gpt-4o", "tools": tools}
    with OpenAI(base_url=session["openai_base_url"], api_key=server.keys["ann"]) as client:

        def ask(messages: list[Any]) -> Any:
            if not stream:
                whole = client.chat.completions.create(messages=messages, **fields)
                return whole.choices[0].message
            with client.chat.completions.stream(messages=messages, **fields) as events:
                return events.get_final_completion().choices[0].message

        message = ask([QUESTION])
        repeated = message.model_dump(include={"role", "content", "tool_calls"})
        call = repeated["tool_calls"][0]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
        assert ask([QUESTION, repeated, result]).content == "It is 42."
    assert_one_sequence(captures, session["capture_id"], server)


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_s_package_calls_a_tool_and_the_turns_are_one_trajectory(
    captures: Captures, server: LiveServer, stream: bool
) -> None:
    session = captures.create(model=MODEL)
    server.backend.script += [f"Let me add.\n{CALL}", "It is 42."]
    fields: Any = {
        "model": "any-claude",
        "max_tokens": 100,
        "system": "Be brief.",
        "tools": [{"name": "add", "input_schema": SCHEMA}],
    }
    with Anthropic(base_url=session["anthropic_base_url"], api_key=server.keys["ann"]) as client:

        def ask(messages: list[Any]) -> Any:
            if not stream:
                return client.messages.create(messages=messages, **fields)
            with client.messages.stream(messages=messages, **fields) as events:
                return events.get_final_message()

        message = ask([QUESTION])
        (call,) = (block for block in message.content if block.type == "tool_use")
        repeated: Any = {"role": "assistant", "content": message.content}
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "42"}
        final = ask([QUESTION, repeated, {"role": "user", "content": [result]}])
        assert final.content[0].text == "It is 42."
    assert_one_sequence(captures, session["capture_id"], server)
    (only,) = captures.trajectories(session["capture_id"])
    assert only["messages"][0]["role"] == "system"


def test_environment_variables_alone_lead_an_agent_into_a_session(
    captures: Captures, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = captures.create(model=MODEL)
    monkeypatch.setenv("OPENAI_BASE_URL", session["openai_base_url"])
    monkeypatch.setenv("OPENAI_API_KEY", server.keys["ann"])
    monkeypatch.setenv("ANTHROPIC_BASE_URL", session["anthropic_base_url"])
    monkeypatch.setenv("ANTHROPIC_API_KEY", server.keys["ann"])
    with OpenAI() as client:
        client.chat.completions.create(model="gpt-4o", messages=[QUESTION], max_tokens=4)
    with Anthropic() as client:
        count = client.messages.count_tokens(model="claude", messages=[QUESTION])
        message = client.messages.create(model="claude", messages=[QUESTION], max_tokens=4)
        assert message.usage.input_tokens == count.input_tokens
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            other = f"{server.url}/captures/cap-other/anthropic"
            client.with_options(base_url=other).messages.create(
                model="claude", messages=[QUESTION], max_tokens=4
            )
    assert captures.get(session["capture_id"])["num_turns"] == 2


def test_smolagents_runs_in_a_session_without_a_changed_line(
    captures: Captures, server: LiveServer
) -> None:
    smolagents = pytest.importorskip("smolagents")

    class Add(smolagents.Tool):
        name = "add"
        description = "Adds two numbers."
        inputs = {  # noqa: RUF012 - the base class has it so
            "a": {"type": "integer", "description": "one"},
            "b": {"type": "integer", "description": "the other"},
        }
        output_type = "integer"

        def forward(self, a: int, b: int) -> int:
            return a + b

    session = captures.create(model=MODEL)
    final = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "42"}}\n</tool_call>'
    server.backend.script += [CALL, final]
    place = {"api_base": session["openai_base_url"], "api_key": server.keys["ann"]}
    model = smolagents.OpenAIModel("gpt-4o", **place, tool_choice="auto")
    agent = smolagents.ToolCallingAgent(tools=[Add()], model=model, verbosity_level=0, max_steps=3)
    assert agent.run("What is 20 + 22?") == "42"
    found = captures.trajectories(session["capture_id"])
    calls = [
        json.loads(call["function"]["arguments"])
        if isinstance(call["function"]["arguments"], str)
        else call["function"]["arguments"]
        for trajectory in found
        for message in trajectory["messages"]
        for call in message.get("tool_calls", [])
    ]
    assert {"a": 20, "b": 22} in calls
    captures.reward(session["capture_id"], 1.0)
    assert len(captures.datums(session["capture_id"])["data"]) == len(found)


def test_the_client_lists_changes_closes_and_deletes(
    captures: Captures, server: LiveServer
) -> None:
    capture_id = captures.create(model="fake/tiny", group="g", metadata={"k": 1})["capture_id"]
    assert captures.change(capture_id, model=MODEL)["model"] == MODEL
    assert capture_id in [one["capture_id"] for one in captures.list()]
    assert captures.close_turns(capture_id)["closed"]
    with Captures(server.url, server.keys["bob"]) as bob, pytest.raises(NotFoundError):
        bob.get(capture_id)
    with pytest.raises(UnprocessableEntityError, match="not in this capture session"):
        captures.reward(capture_id, 1.0, turn="x")
    captures.delete(capture_id)
    with pytest.raises(NotFoundError):
        captures.get(capture_id)


def command(server: LiveServer, *arguments: str, user: str = "ann") -> int:
    place = ("--base-url", server.url, "--api-key", server.keys[user])
    return main(["captures", *arguments, *place])


def test_the_command_makes_lists_rewards_closes_and_deletes_a_session(
    captures: Captures, server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(server, "create", "--model", MODEL) == 0
    name, openai_line, anthropic_line = capsys.readouterr().out.splitlines()
    capture_id = name.removeprefix("# ")
    url = openai_line.removeprefix("export OPENAI_BASE_URL=")
    assert anthropic_line.endswith(f"/captures/{capture_id}/anthropic")
    with OpenAI(base_url=url, api_key=server.keys["ann"]) as client:
        answer = client.chat.completions.create(model="m", messages=[QUESTION], max_tokens=4)
    assert command(server, "reward", capture_id, "0.5", "--turn", answer.id) == 0
    assert command(server, "list") == 0
    assert f"{capture_id}  1 turns  open  {MODEL}" in capsys.readouterr().out
    assert command(server, "get", capture_id) == 0
    assert json.loads(capsys.readouterr().out)["trajectories"][0]["reward"] == 0.5
    assert command(server, "get", capture_id, "--datums", "ppo") == 0
    assert json.loads(capsys.readouterr().out)["num_trajectories"] == 1
    assert command(server, "close", capture_id) == 0
    assert captures.get(capture_id)["closed"]
    assert command(server, "delete", capture_id, user="bob") == 1
    assert "does not exist" in capsys.readouterr().err
    assert command(server, "delete", capture_id) == 0
