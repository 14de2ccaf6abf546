"""A tool-using agent of smolagents, which knows OpenAI's API only, unchanged but for its URL."""

from pathlib import Path

import pytest
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

from tests.chat.live_server import MODEL, live_server


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_calls_its_tools_and_answers(tmp_path: Path, stream: bool) -> None:
    asked: list[str] = []

    @tool
    def weather(place: str) -> str:
        """The weather of a place.

        Args:
            place: The place.
        """
        asked.append(place)
        return f"rain in {place}"

    with live_server(tmp_path) as server:
        server.backend.script += [
            call("weather", '{"place": "Zürich"}'),
            call("final_answer", '{"answer": "It rains."}'),
        ]
        model = OpenAIModel(MODEL, api_base=server.openai_url, api_key=server.keys["ann"])
        agent = ToolCallingAgent(
            [weather], model, max_steps=3, stream_outputs=stream, verbosity_level=LogLevel.OFF
        )
        assert agent.run("How is the weather in Zürich?") == "It rains."
        assert asked == ["Zürich"]
        first, second = server.backend.prompts()
        assert '"name": "weather"' in first
        assert "rain in Zürich" in second and "rain in Zürich" not in first
        assert all(request.grammar is not None for request in server.backend.requests)
