"""What the console's page reads, against the API and the results that clients got."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.harness import Api, serving, wire_datum
from tests.chat.model_folder import write_model_folder
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.config import Config, ModelSource
from tinkercloud.core.types import ServedModel
from tinkercloud.routers.console import data as console_data

Event = tuple[str, Any]


@pytest.fixture(autouse=True)
def one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """ASGITransport answers when a stream has ended: after its first events here."""
    monkeypatch.setattr(console_data, "NUM_EVENTS", 1)
    monkeypatch.setattr(console_data, "INTERVAL_S", 0.0)


async def events(api: Api, path: str) -> list[Event]:
    answer = await api.http.get(path)
    assert answer.status_code == 200, answer.text
    return events_of(answer.text)


def events_of(text: str) -> list[Event]:
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("event: ")]
    return [
        (name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
        for name, data in blocks
    ]


async def live(api: Api) -> dict[str, Any]:
    ((name, view),) = await events(api, "/console/events")
    assert name == "server"
    return view


async def points(api: Api, model_id: str, after_step: int = 0) -> list[dict[str, Any]]:
    path = f"/console/runs/{model_id}/events?after_step={after_step}"
    ((name, points),) = await events(api, path)
    assert name == "points"
    return points


async def test_a_curve_is_what_the_clients_results_said(api: Api) -> None:
    model_id = await api.model()
    expected: list[float] = []
    for step in range(3):
        passes = [await api.forward_backward(model_id, 3 * step + i) for i in (1, 2)]
        losses = [(await api.result(accepted)).metrics["loss:sum"] for accepted in passes]
        await api.result(await api.optim_step(model_id, 3 * step + 3, learning_rate=0.1))
        expected.append(sum(losses))
    curve = await points(api, model_id)
    assert [point["step"] for point in curve] == [1, 2, 3]
    assert [point["metrics"]["loss:sum"] for point in curve] == pytest.approx(expected)
    assert [point["seq_id"] for point in curve] == [3, 6, 9]


async def test_a_curve_goes_on_where_the_page_has_it(api: Api) -> None:
    model_id = await api.model()
    await api.train(model_id, 1)
    first = await points(api, model_id)
    await api.train(model_id, 3)
    assert await points(api, model_id, after_step=len(first)) == (await points(api, model_id))[1:]


async def test_means_are_over_the_datums_of_a_step(api: Api) -> None:
    """Of two passes with one and three datums."""
    model_id = await api.model()
    datum = wire_datum(weights=0, logprobs=[-1.0] * 4, advantages=[1.0] * 4)
    outputs = [
        await api.result(await api.forward_backward(model_id, i, [datum] * n, loss_fn="ppo"))
        for i, n in ((1, 1), (2, 3))
    ]
    await api.result(await api.optim_step(model_id, 3, learning_rate=0.1))
    (point,) = await points(api, model_id)
    kl = [output.metrics["ppo_kl:mean"] for output in outputs]
    assert point["metrics"]["ppo_kl:mean"] == pytest.approx((kl[0] + 3 * kl[1]) / 4)
    assert point["metrics"]["trained_tokens:sum"] == 16


async def test_what_has_failed_is_no_point(api: Api) -> None:
    model_id = await api.model()
    await api.failure(await api.forward_backward(model_id, 1, loss_fn="no_such_loss"))
    await api.train(model_id, 2)
    (point,) = await points(api, model_id)
    assert point["step"] == 1


async def test_another_users_curve_is_not_shown(api: Api) -> None:
    model_id = await api.model()
    path = f"/console/runs/{model_id}/events"
    assert (await api.as_user("bob").http.get(path)).status_code == 404
    assert (await api.as_user("eve").http.get(path)).status_code == 200  # an administrator


async def test_the_live_view_is_what_metrics_say(api: Api) -> None:
    await api.model()
    eve = api.as_user("eve")
    view = await live(eve)
    ended = {
        (labels["kind"], labels["user"]): value
        for name, labels, value in view["metrics"]
        if name == "tinkercloud_operations_total"
    }
    assert ended == {("CreateModel", "ann"): 1}
    assert view["whole_server"] is True
    assert any(name == "process_resident_memory_bytes" for name, _, _ in view["metrics"])


async def test_a_user_sees_own_numbers_and_own_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = asyncio.Event()

    async def held(self: FakeBackend, *args, **options):
        await go_on.wait()
        return {}

    monkeypatch.setattr(FakeBackend, "optim_step", held)
    async with serving(tmp_path) as api:
        bob = api.as_user("bob")
        model_id, other = await api.model(), await bob.model()
        steps = [await api.optim_step(model_id, n) for n in (1, 2, 3)]
        theirs = await bob.optim_step(other, 1)
        (queue,) = (await live(api))["queues"]
        assert queue.pop("oldest_s") > 0
        assert queue == {
            "user": "ann", "owner": model_id, "kind": "OptimStep", "waiting": 2, "running": 1,
        }  # fmt: skip
        assert {q["user"] for q in (await live(api.as_user("eve")))["queues"]} == {"ann", "bob"}
        view = await live(api)
        assert view["whole_server"] is False
        assert "speculation" not in view
        assert all(labels["user"] == "ann" for _, labels, _ in view["metrics"])
        go_on.set()
        for client, step in [*((api, step) for step in steps), (bob, theirs)]:
            await client.result(step)


@pytest.fixture
async def chatty(tmp_path: Path) -> AsyncIterator[Api]:
    """A server with the model "chatty", which has a tokenizer, and one without."""
    source = ModelSource("chatty", write_model_folder(tmp_path / "chatty"))
    async with serving(tmp_path / "chats", models=(source,)) as api:
        yield api


async def test_samples_are_shown_as_their_clients_got_them(chatty: Api) -> None:
    sampler_id = await chatty.sampler(await chatty.session(), base_model="chatty")
    params = {"max_tokens": 9, "temperature": 1.0, "seed": 4}
    accepted = await chatty.sample(sampler_id, sampling_params=params, num_samples=2)
    output = await chatty.result(accepted)
    (shown,) = (await chatty.http.get("/console/samples")).json()["samples"]
    assert shown["request_id"] == accepted["request_id"]
    assert (shown["base_model"], shown["temperature"], shown["seed"]) == ("chatty", 1.0, 4)
    for sequence, expected in zip(shown["sequences"], output.sequences, strict=True):
        logprobs = [logprob for _, logprob in sequence["tokens"]]
        assert logprobs == pytest.approx(expected.logprobs.tolist())
        assert sequence["num_tokens"] == len(expected.tokens)


async def test_the_text_of_tokens_adds_up_to_the_text(chatty: Api) -> None:
    text = (await chatty.services.chats.sample_texts._texts.get("chatty")).codec
    tokens = list(range(200, 300))
    from tinkercloud.services.chats.sample_texts import token_texts

    pieces = token_texts(tokens, text)
    assert len(pieces) == len(tokens)
    whole = b"".join(text.bytes_of(token) or text.name_of(token).encode() for token in tokens)
    assert "".join(pieces) == whole.decode("utf-8", "replace")


async def test_nobody_sees_samples_of_others(chatty: Api) -> None:
    sampler_id = await chatty.sampler(await chatty.session(), base_model="chatty")
    await chatty.result(await chatty.sample(sampler_id))
    for user, num_shown in (("ann", 1), ("bob", 0), ("reader", 1)):
        answer = await chatty.as_user(user).http.get("/console/samples")
        assert len(answer.json()["samples"]) == num_shown, user


async def test_the_chat_box_answers_as_the_openai_route_does(chatty: Api) -> None:
    body = {
        "model": "chatty", "seed": 5, "max_tokens": 12,
        "messages": [{"role": "user", "content": "one two"}],
    }  # fmt: skip
    here, there = [
        (await chatty.http.post(path, json=body)).json()["choices"]
        for path in ("/console/chat", "/oai/api/v1/chat/completions")
    ]
    assert here == there


class Broken(FakeBackend):
    """Its numbers cannot be written as JSON."""

    async def start(self) -> tuple[ServedModel, ...]:
        return await super().start()

    def stats(self) -> dict[str, float | int | str]:
        return {"odd": float("nan"), "even": 2}


async def test_what_is_no_number_is_left_out(tmp_path: Path) -> None:
    async with serving(tmp_path, backend=Broken(Config(backend="fake"))) as api:
        metrics = {name: value for name, _, value in (await live(api.as_user("eve")))["metrics"]}
    assert metrics["tinkercloud_even"] == 2
    assert "tinkercloud_odd" not in metrics


async def test_a_stream_ends_with_its_server(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(console_data, "NUM_EVENTS", 100)
    monkeypatch.setattr(console_data, "INTERVAL_S", 3600.0)
    pause, pauses = console_data._pause, asyncio.Event()

    async def watched(services: Any) -> bool:
        pauses.set()
        return await pause(services)

    monkeypatch.setattr(console_data, "_pause", watched)
    async with serving(tmp_path) as api:
        stream: asyncio.Task[httpx.Response] = asyncio.ensure_future(
            api.http.get("/console/events")
        )
        await pauses.wait()
        assert not stream.done()
    assert len(events_of((await stream).text)) == 1
