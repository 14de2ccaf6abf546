"""An agent in a capture session on SmolLM2: what it sampled, to the token; and its recipe."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.clients import MODEL
from tests.e2e.own_recipes import recipe
from tests.serving import Server
from tinker_gmi import ModelInput, ServiceClient
from tinker_gmi.captures import Captures


@pytest.fixture(scope="module")
def server(float32_server: Server) -> Server:
    return float32_server


@pytest.fixture(scope="module")
def datum(server: Server) -> dict[str, Any]:
    """Of a conversation of three turns at a high temperature; and its turns."""
    with Captures(server.base_url, server.api_key) as captures:
        session = captures.create(model=MODEL)
        url = session["openai_base_url"]
        messages: list[Any] = [{"role": "user", "content": "Tell me about rivers."}]
        with OpenAI(base_url=url, api_key=server.api_key) as client:
            for seed in range(3):
                answer = client.chat.completions.create(
                    model="any", messages=messages, max_tokens=24, temperature=1.7, seed=seed
                )
                messages.append(answer.choices[0].message.model_dump(exclude_none=True))
                messages.append({"role": "user", "content": "Go on."})
        captures.reward(session["capture_id"], 1.0)
        (only,) = captures.datums(session["capture_id"], advantages="raw")["data"]
        (trajectory,) = captures.trajectories(session["capture_id"])
        return {"datum": only["datum"], **trajectory}


def columns(datum: dict[str, Any]) -> tuple[list[int], list[float], list[float]]:
    """All tokens; log-probabilities and advantages of those but the first."""
    fields = datum["datum"]
    inputs = {name: tensor["data"] for name, tensor in fields["loss_fn_inputs"].items()}
    first = fields["model_input"]["chunks"][0]["tokens"][:1]
    return first + inputs["target_tokens"], inputs["logprobs"], inputs["advantages"]


def test_the_drift_is_0_on_smollm2_where_the_text_s_own_tokens_differ(
    server: Server, datum: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.sdk_environment.items():
        monkeypatch.setenv(name, value)
    with ServiceClient() as service:
        tokenizer = service.create_sampling_client(base_model=MODEL).result().get_tokenizer()
    tokens, _, gains = columns(datum)
    num_drifted = num_sampled = place = 0
    for turn in datum["turns"]:
        place += turn["num_prompt_tokens"]
        sampled = tokens[place : place + turn["num_sampled_tokens"]]
        assert all(gains[place - 1 : place - 1 + len(sampled)])
        place += len(sampled)
        again = tokenizer.encode(tokenizer.decode(sampled), add_special_tokens=False)
        num_drifted += sum(a != b for a, b in zip(again, sampled, strict=False))
        num_drifted += abs(len(again) - len(sampled))
        num_sampled += len(sampled)
    assert place == len(tokens)
    assert num_drifted > 0, f"all of {num_sampled} samples were canonical: nothing was shown"


def test_the_log_probabilities_are_those_of_the_whole_sequence(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At temperature 1 the model gives the datum's tokens, in one pass, what they were drawn with:
    the prompts that were sampled from were those that the datum has."""
    for name, value in server.sdk_environment.items():
        monkeypatch.setenv(name, value)
    with Captures(server.base_url, server.api_key) as captures:
        session = captures.create(model=MODEL)
        messages: list[Any] = [{"role": "user", "content": "Name a river."}]
        with OpenAI(base_url=session["openai_base_url"], api_key=server.api_key) as client:
            for seed in range(2):
                answer = client.chat.completions.create(
                    model="any", messages=messages, max_tokens=16, seed=seed
                )
                messages.append(answer.choices[0].message.model_dump(exclude_none=True))
                messages.append({"role": "user", "content": "Another one."})
        captures.reward(session["capture_id"], 1.0)
        (only,) = captures.datums(session["capture_id"], advantages="raw")["data"]
    tokens, logprobs, gains = columns(only)
    with ServiceClient() as service:
        sampler = service.create_sampling_client(base_model=MODEL).result()
        scored = sampler.compute_logprobs(ModelInput.from_ints(tokens)).result()
    for drawn, gain, score in zip(logprobs, gains, scored[1:], strict=True):
        assert gain == 0 or score == pytest.approx(drawn, abs=1e-3)


def agent_rl(server: Server, steps: int, out: Path) -> str:
    """What it printed."""
    quick = ("--warm-up", "1", "--questions", "2", "--group-size", "3", "--held-out", "1")
    goes = ("--steps", str(steps), "--save-every", "1", "--out", str(out))
    return recipe(server, "agent_rl", *quick, *goes)


@pytest.mark.slow
def test_the_recipe_trains_the_agent_goes_on_and_leaves_its_curve(
    server: Server, tmp_path: Path
) -> None:
    assert "warm-up loss" in agent_rl(server, 1, tmp_path)
    first = json.loads((tmp_path / "agent.json").read_text())
    said = agent_rl(server, 2, tmp_path)
    assert "going on behind step 1" in said
    assert "warm-up loss" not in said
    run = json.loads((tmp_path / "agent.json").read_text())
    assert len(run["values"]) == 2
    assert run["values"][0] == first["values"][0]
    assert run["before"] == first["before"]
    assert run["state_path"].startswith("tinker://")
    assert (tmp_path / "agent.png").read_bytes().startswith(b"\x89PNG")
