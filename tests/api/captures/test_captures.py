"""Capture sessions over HTTP: turns kept to the token, trajectories, rewards, datums, two users."""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tokenizers import Tokenizer

import tinker_gmi
from tests.api.harness import Api, serving
from tests.chat.live_server import ScriptedBackend
from tests.chat.model_folder import write_model_folder
from tinkercloud.config import Config, ModelSource

QUESTION = {"role": "user", "content": "Count the owners of the café."}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    """A server with the model "chatty": it says what is in its backend's script, or draws."""
    source = ModelSource("chatty", write_model_folder(tmp_path / "chatty"))
    config = Config(data_dir=tmp_path / "data", backend="fake", models=(source,))
    backend = ScriptedBackend(config, Tokenizer.from_file(str(source.path / "tokenizer.json")))
    async with serving(tmp_path / "data", backend=backend, models=(source,)) as api:
        yield api


def backend_of(api: Api) -> ScriptedBackend:
    backend = api.services.backend
    assert isinstance(backend, ScriptedBackend)
    return backend


async def capture(api: Api, **fields: Any) -> str:
    return (await api.ok("captures", **({"model": "chatty"} | fields)))["capture_id"]


async def ask(api: Api, where: str, messages: list[Any], **fields: Any) -> dict[str, Any]:
    """An answer within a session; where: its id, with labels."""
    body = {"model": "gpt-4o", "messages": messages, "max_tokens": 24, "return_token_ids": True}
    url = f"/captures/{where}/oai/api/v1/chat/completions"
    response = await api.http.post(url, json=body | fields)
    assert response.status_code == 200, response.text
    return response.json()


def said(answer: dict[str, Any], index: int = 0) -> dict[str, Any]:
    return answer["choices"][index]["message"]


async def trajectories(api: Api, capture_id: str, **query: Any) -> list[dict[str, Any]]:
    response = await api.get(f"captures/{capture_id}/trajectories", **query)
    assert response.status_code == 200, response.text
    return response.json()["trajectories"]


async def datums(api: Api, capture_id: str, **query: Any) -> dict[str, Any]:
    response = await api.get(f"captures/{capture_id}/datums", **query)
    assert response.status_code == 200, response.text
    return response.json()


async def reward(api: Api, capture_id: str, value: float, **target: Any) -> dict[str, Any]:
    return await api.ok(f"captures/{capture_id}/rewards", value=value, **target)


async def episode(api: Api, where: str, num_turns: int = 3, **fields: Any) -> list[dict[str, Any]]:
    """A conversation of so many turns, and its answers."""
    messages: list[Any] = [SYSTEM, QUESTION]
    answers: list[dict[str, Any]] = []
    for turn in range(num_turns):
        answers.append(await ask(api, where, messages, seed=turn, **fields))
        messages += [said(answers[-1]), {"role": "user", "content": f"And then, {turn}?"}]
    return answers


async def test_the_model_s_name_is_a_label_in_a_session(api: Api) -> None:
    capture_id = await capture(api)
    assert (await ask(api, capture_id, [QUESTION]))["model"] == "gpt-4o"
    (only,) = await trajectories(api, capture_id)
    assert only["turns"][0]["model"] == "gpt-4o"
    assert only["turns"][0]["weights"]["base_model"] == "chatty"
    url = f"/captures/{capture_id}/oai/api/v1/models/gpt-4o"
    assert (await api.http.get(url)).json()["id"] == "gpt-4o"


async def test_a_prompt_goes_on_from_the_sampled_tokens_and_not_from_their_text(api: Api) -> None:
    answers = await episode(api, await capture(api), 4)
    for before, after in pairwise(answers):
        exact = before["prompt_token_ids"] + before["choices"][0]["token_ids"]
        assert after["prompt_token_ids"][: len(exact)] == exact


async def test_the_drift_is_0_where_tokens_made_from_the_text_again_differ(api: Api) -> None:
    answers = await episode(api, await capture(api), 4, temperature=2.0)
    tokenizer = backend_of(api)._tokenizer
    num_sampled = num_other = 0
    for before, after in pairwise(answers):
        start = len(before["prompt_token_ids"])
        sampled = before["choices"][0]["token_ids"]
        num_sampled += len(sampled)
        assert after["prompt_token_ids"][start : start + len(sampled)] == sampled
        again = tokenizer.encode(said(before)["content"], add_special_tokens=False).ids
        num_other += sum(a != b for a, b in zip(again, sampled, strict=False))
        num_other += abs(len(again) - len(sampled))
    assert num_other > num_sampled / 4, "samples were canonical: nothing was shown"


async def test_a_trajectory_is_one_datum_of_the_tokens_that_were_read_and_drawn(api: Api) -> None:
    capture_id = await capture(api)
    answers = await episode(api, capture_id, 3, logprobs=True)
    await reward(api, capture_id, 0.5)
    (only,) = (await datums(api, capture_id, advantages="raw"))["data"]
    fields = only["datum"]
    tensors = {name: tinker.TensorData(**t) for name, t in fields["loss_fn_inputs"].items()}
    datum = tinker.Datum(tinker.ModelInput.model_validate(fields["model_input"]), tensors)
    assert tinker_gmi.types.Datum.model_validate(fields).model_input.to_ints()
    inputs = {name: tensor.to_numpy() for name, tensor in datum.loss_fn_inputs.items()}
    whole = answers[-1]["prompt_token_ids"] + answers[-1]["choices"][0]["token_ids"]
    assert datum.model_input.to_ints() == whole[:-1]
    assert inputs["target_tokens"].tolist() == whole[1:]
    expected = [(0.0, 0.0)] * len(whole)
    for answer in answers:
        start = len(answer["prompt_token_ids"])
        for place, token in enumerate(answer["choices"][0]["logprobs"]["content"], start=start):
            expected[place] = (token["logprob"], 0.5)
    pairs = list(zip(inputs["logprobs"].tolist(), inputs["advantages"].tolist(), strict=True))
    assert pairs == expected[1:]


@pytest.mark.parametrize("loss", ["cispo", "dro", "gspo", "importance_sampling", "ppo"])
async def test_datums_are_taken_by_forward_backward_and_the_ratio_is_1(api: Api, loss: str) -> None:
    capture_id = await capture(api)
    await episode(api, capture_id, 2)
    await reward(api, capture_id, 1.0)
    (only,) = (await datums(api, capture_id, loss=loss, advantages="raw"))["data"]
    model_id = await api.model(base_model="chatty")
    accepted = await api.ok(
        "forward_backward",
        model_id=model_id,
        seq_id=1,
        forward_backward_input={"data": [only["datum"]], "loss_fn": loss},
    )
    output = await api.result(accepted)
    inputs = only["datum"]["loss_fn_inputs"]
    logprobs = output.outputs[0]["logprobs"].tolist()
    for scored, drawn, gain in zip(
        logprobs, inputs["logprobs"]["data"], inputs["advantages"]["data"], strict=True
    ):
        assert gain == 0 or scored == pytest.approx(drawn, abs=1e-4)


async def test_advantages_are_centered_in_their_group(api: Api) -> None:
    capture_id = await capture(api)
    for group, rewards in {"a": (1.0, 0.0), "b": (2.0, 4.0, 6.0)}.items():
        for number, value in enumerate(rewards):
            where = f"{capture_id}/groups/{group}/episodes/{number}"
            await ask(api, where, [QUESTION], seed=number)
            await reward(api, capture_id, value, group=group, episode=str(number))
    found = (await datums(api, capture_id))["data"]
    gains = {(d["group"], d["episode"]): d["advantages"] for d in found}
    assert gains == {
        ("a", "0"): [0.5],
        ("a", "1"): [-0.5],
        ("b", "0"): [-2.0],
        ("b", "1"): [0.0],
        ("b", "2"): [2.0],
    }


async def test_trajectories_without_a_reward_are_counted_and_left_out(api: Api) -> None:
    capture_id = await capture(api)
    await ask(api, f"{capture_id}/episodes/1", [QUESTION])
    await ask(api, f"{capture_id}/episodes/2", [QUESTION])
    await reward(api, capture_id, 1.0, episode="2")
    found = await datums(api, capture_id)
    assert [d["episode"] for d in found["data"]] == ["2"]
    assert (found["num_trajectories"], found["num_without_reward"]) == (1, 1)


async def test_the_same_reward_again_replaces_and_another_key_adds(api: Api) -> None:
    capture_id = await capture(api)
    answer = await ask(api, capture_id, [QUESTION])
    for value, key in ((1.0, ""), (2.0, ""), (0.25, "style"), (0.5, "style")):
        await reward(api, capture_id, value, turn=answer["id"], key=key)
    (only,) = await trajectories(api, capture_id)
    assert only["reward"] == 2.5


async def test_only_the_retry_that_the_agent_went_on_with_is_trained(api: Api) -> None:
    capture_id = await capture(api)
    tries = [await ask(api, capture_id, [QUESTION], seed=seed) for seed in range(3)]
    await ask(api, capture_id, [QUESTION, said(tries[1]), QUESTION])
    (only,) = await trajectories(api, capture_id)
    assert f"chatcmpl-{only['turns'][0]['turn_id']}" == tries[1]["id"]
    assert len(await trajectories(api, capture_id, branches="all")) == 3


async def test_samples_of_one_turn_are_siblings(api: Api) -> None:
    capture_id = await capture(api)
    answer = await ask(api, capture_id, [QUESTION], n=3, seed=1)
    assert len(await trajectories(api, capture_id)) == 3
    await ask(api, capture_id, [QUESTION, said(answer, 2), QUESTION])
    (only,) = await trajectories(api, capture_id)
    assert only["turns"][0]["sample"].endswith(":2")


async def test_a_sub_agent_begins_a_trajectory_of_its_own_in_the_episode(api: Api) -> None:
    capture_id = await capture(api)
    where = f"{capture_id}/episodes/7"
    first = await ask(api, where, [SYSTEM, QUESTION])
    helper = [{"role": "system", "content": "You look things up."}, QUESTION]
    await ask(api, where, helper)
    await ask(api, where, [SYSTEM, QUESTION, said(first), {"role": "user", "content": "Go on."}])
    found = await trajectories(api, capture_id)
    assert [(t["episode"], t["num_turns"]) for t in found] == [("7", 2), ("7", 1)]


async def test_episodes_by_header_and_by_url_are_the_same(api: Api) -> None:
    capture_id = await capture(api)
    first = await ask(api, f"{capture_id}/episodes/e1", [QUESTION])
    headers = {"X-Capture-Id": capture_id, "X-Trajectory-Id": "e1"}
    body = {"model": "any", "messages": [QUESTION, said(first), QUESTION], "max_tokens": 4}
    response = await api.http.post("/oai/api/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200
    (only,) = await trajectories(api, capture_id)
    assert only["num_turns"] == 2


async def test_concurrent_episodes_with_equal_texts_stay_apart(api: Api) -> None:
    capture_id = await capture(api)
    where = [f"{capture_id}/episodes/{number}" for number in range(6)]
    await asyncio.gather(*(episode(api, one, 3) for one in where))
    found = await trajectories(api, capture_id)
    assert sorted((t["episode"], t["num_turns"]) for t in found) == [(str(n), 3) for n in range(6)]


async def test_a_session_moves_to_newer_weights_and_each_turn_says_which(api: Api) -> None:
    model_id = await api.model(base_model="chatty")
    session = model_id.split(":")[0]
    capture_id = await capture(api, model=None, follow=model_id)
    url = f"/captures/{capture_id}/oai/api/v1/chat/completions"
    early = await api.http.post(url, json={"model": "m", "messages": [QUESTION]})
    assert early.status_code == 400
    assert "save_weights_for_sampler" in early.json()["error"]["message"]
    paths: list[str] = []
    for number, seq_id in enumerate((1, 2)):
        saved = await api.ok(
            "save_weights_for_sampler", model_id=model_id, path=f"v{number}", seq_id=seq_id
        )
        paths.append((await api.result(saved))["path"])
        await ask(api, f"{capture_id}/episodes/{number}", [QUESTION])
    saved = await api.ok(
        "save_weights_for_sampler", model_id=model_id, sampling_session_seq_id=9, seq_id=3
    )
    await api.result(saved)
    await ask(api, f"{capture_id}/episodes/2", [QUESTION])
    weights = [t["turns"][0]["weights"] for t in await trajectories(api, capture_id)]
    assert [w["model_path"] for w in weights] == [*paths, None]
    assert weights[2]["sampling_session_id"] == f"{session}:sample:9"
    assert len({w["version"] for w in weights}) == 3


async def test_a_session_is_changed_to_another_model(api: Api) -> None:
    capture_id = await capture(api, model="fake/tiny")
    response = await api.http.patch(f"/api/v1/captures/{capture_id}", json={"model": "chatty"})
    assert response.json()["model"] == "chatty"
    await ask(api, capture_id, [QUESTION])


async def test_a_stream_is_kept_whole_and_a_broken_one_not_at_all(api: Api) -> None:
    capture_id = await capture(api)
    url = f"/captures/{capture_id}/oai/api/v1/chat/completions"
    backend_of(api).script += ["A whole answer.", "An answer that nobody waits for."]
    body = {"model": "m", "messages": [QUESTION], "stream": True}
    assert (await api.http.post(url, json=body)).text.endswith("data: [DONE]\n\n")
    backend_of(api).pause_s = 0.05
    task = asyncio.ensure_future(api.http.post(url, json=body))
    await asyncio.sleep(0.2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    backend_of(api).pause_s = 0.0
    (only,) = await trajectories(api, capture_id)
    assert only["messages"][-1]["content"] == "A whole answer."
    assert only["num_turns"] == 1


async def test_tool_calls_are_kept_and_their_results_continue_the_turn(api: Api) -> None:
    capture_id = await capture(api)
    call = '<tool_call>\n{"name":"add","arguments":{"a": 1,"b":2}}\n</tool_call>'
    backend_of(api).script += [f"Wait.  \n{call}", "It is 3."]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    first = await ask(api, capture_id, [QUESTION], tools=tools)
    message = said(first)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
    second = await ask(api, capture_id, [QUESTION, message, result], tools=tools)
    exact = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second["prompt_token_ids"][: len(exact)] == exact
    prompt = backend_of(api).prompts()[1]
    assert prompt.count("<|im_start|>assistant") == 2
    assert f"{call}<|im_end|><|im_start|>tool\n3<|im_end|>" in prompt
    (only,) = await trajectories(api, capture_id)
    assert [m["role"] for m in only["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert only["tools"][0]["function"]["name"] == "add"


async def test_a_closed_session_takes_no_turns_and_an_episode_is_closed_alone(api: Api) -> None:
    capture_id = await capture(api)
    url = "/captures/{}/oai/api/v1/chat/completions"
    body = {"model": "m", "messages": [QUESTION], "max_tokens": 4}
    await api.ok(f"captures/{capture_id}/close", episode="1")
    closed = await api.http.post(url.format(f"{capture_id}/episodes/1"), json=body)
    assert closed.status_code == 410
    await ask(api, f"{capture_id}/episodes/2", [QUESTION])
    await api.ok(f"captures/{capture_id}/close")
    assert (await api.http.post(url.format(capture_id), json=body)).status_code == 410


@pytest.mark.parametrize(("setting", "limit"), [("capture_bytes", 2000), ("capture_turns", 2)])
async def test_a_session_without_room_refuses_and_says_what_to_do(
    tmp_path: Path, setting: str, limit: int
) -> None:
    source = ModelSource("chatty", write_model_folder(tmp_path / "chatty"))
    async with serving(tmp_path / "data", models=(source,), **{setting: limit}) as api:
        capture_id = await capture(api)
        url = f"/captures/{capture_id}/oai/api/v1/chat/completions"
        body = {"model": "m", "messages": [QUESTION], "max_tokens": 4}
        for _ in range(4):
            last = await api.http.post(url, json=body)
        assert last.status_code == 400
        assert setting in last.json()["error"]["message"]
        assert (await api.http.delete(f"/api/v1/captures/{capture_id}")).status_code == 204
        await ask(api, await capture(api), [QUESTION], max_tokens=4)


async def test_a_session_goes_after_its_time_with_all_that_it_holds(api: Api) -> None:
    capture_id = await capture(api, ttl_s=60)
    await ask(api, capture_id, [QUESTION], max_tokens=2)
    long_ago = "UPDATE captures SET used_at = used_at - 61"
    await api.services.database.write(long_ago)
    assert (await api.get(f"captures/{capture_id}")).status_code == 404
    await api.services.captures.sessions.expire()
    for table in ("captures", "capture_turns", "capture_samples"):
        assert await api.services.database.all(f"SELECT * FROM {table}") == []


async def test_another_user_finds_nothing_of_a_session(api: Api) -> None:
    capture_id = await capture(api)
    await ask(api, f"{capture_id}/episodes/1", [QUESTION])
    bob = api.as_user("bob")
    assert (await bob.get("captures")).json() == {"captures": []}
    chat = {"model": "m", "messages": [QUESTION], "max_tokens": 4}
    path, session = f"/api/v1/captures/{capture_id}", f"/captures/{capture_id}"
    requests: list[tuple[str, str, Any]] = [
        ("GET", path, None),
        ("PATCH", path, {"model": "chatty"}),
        ("DELETE", path, None),
        ("POST", f"{path}/close", {}),
        ("POST", f"{path}/rewards", {"value": 1}),
        ("GET", f"{path}/trajectories", None),
        ("GET", f"{path}/datums", None),
        ("POST", f"{session}/oai/api/v1/chat/completions", chat),
        ("POST", f"{session}/anthropic/v1/messages", chat),
        ("POST", f"{session}/anthropic/v1/messages/count_tokens", chat),
        ("GET", f"{session}/oai/api/v1/models", None),
    ]
    unknown = "cap-" + "0" * 32
    for method, url, body in requests:
        answers: list[httpx.Response] = []
        for name in (capture_id, unknown):
            where = url.replace(capture_id, name)
            answers.append(await bob.http.request(method, where, json=body))
        assert [a.status_code for a in answers] == [404, 404], url
        assert answers[0].text == answers[1].text.replace(unknown, capture_id)
    header = {"X-Capture-Id": capture_id}
    response = await bob.http.post("/oai/api/v1/chat/completions", json=chat, headers=header)
    assert response.status_code == 404
    assert (await trajectories(api, capture_id))[0]["num_turns"] == 1


async def test_a_session_needs_weights_that_are_the_user_s(api: Api) -> None:
    model_id = await api.model(base_model="chatty")
    bob = api.as_user("bob")
    assert (await bob.post("captures", follow=model_id)).status_code == 404
    sampler = await api.sampler(model_id.split(":")[0], 4)
    assert (await bob.post("captures", model=sampler)).status_code == 404
    assert (await api.post("captures")).status_code == 422
    assert (await api.post("captures", model="chatty", follow=model_id)).status_code == 422
    assert (await api.post("captures", model="nothing")).status_code == 404


async def test_a_reward_for_what_is_not_there_is_refused(api: Api) -> None:
    capture_id, other = await capture(api), await capture(api)
    answer = await ask(api, other, [QUESTION])
    for target in ({"turn": answer["id"]}, {"trajectory": "x"}, {"turn": "x:0"}):
        response = await api.post(f"captures/{capture_id}/rewards", value=1.0, **target)
        assert response.status_code == 422
        assert "is not in this capture session" in response.text


async def test_a_label_that_is_none_is_refused(api: Api) -> None:
    capture_id = await capture(api)
    url = f"/captures/{capture_id}/episodes/a b/oai/api/v1/chat/completions"
    response = await api.http.post(url, json={"model": "m", "messages": [QUESTION]})
    assert response.status_code == 400
    assert "label of the episode" in response.json()["error"]["message"]
