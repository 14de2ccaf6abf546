"""Sampling sessions, what they pin, and what a request may ask."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.api.harness import Api, serving
from tests.waiting import async_wait_for
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.config import Config
from tinkercloud.core.types import (
    FromCheckpoint,
    OnTokens,
    SampleOutput,
    SampleRequest,
    WeightsSource,
)

PROMPT = [1, 2, 3]


async def tokens(api: Api, sampler_id: str, **fields: Any) -> list[int]:
    output = await api.result(await api.sample(sampler_id, **fields))
    return output.sequences[0].tokens.tolist()


async def ephemeral(api: Api, model_id: str, number: int, seq_id: int, **fields: Any) -> str:
    body = {"model_id": model_id, "sampling_session_seq_id": number, "seq_id": seq_id}
    result = await api.result(await api.ok("save_weights_for_sampler", **body, **fields))
    assert result["sampling_session_id"] == f"{model_id.split(':')[0]}:sample:{number}"
    return result["sampling_session_id"]


async def probe(api: Api, sampler_id: str) -> bytes:
    """The weights behind a sampler, seen through log-probabilities."""
    output = await api.result(await api.sample(sampler_id, prompt_logprobs=True))
    return output.prompt_logprobs.tobytes()


async def test_the_acknowledgement_names_each_sequence(api: Api) -> None:
    sampler_id = await api.sampler(await api.session())
    accepted = await api.sample(sampler_id, num_samples=3, sampling_params={"max_tokens": 4})
    ids = accepted["sample_sequence_ids"]
    assert len(set(ids)) == 3
    assert len((await api.result(accepted)).sequences) == 3


async def test_a_sampler_describes_itself(api: Api) -> None:
    sampler_id = await api.sampler(await api.session())
    assert (await api.get(f"samplers/{sampler_id}")).json() == {
        "sampler_id": sampler_id,
        "base_model": "fake/tiny",
        "tokenizer_id": "fake/tiny",
    }


async def test_an_ephemeral_sampler_keeps_its_version_while_training_goes_on(api: Api) -> None:
    model_id = await api.model()
    first = await ephemeral(api, model_id, 0, 1)
    before = await probe(api, first)
    await api.train(model_id, 2)
    second = await ephemeral(api, model_id, 1, 4)
    assert await probe(api, first) == before
    assert await probe(api, second) != before


async def test_inflight_samplers_of_a_model_follow_its_latest_inflight_save(api: Api) -> None:
    model_id = await api.model()
    pinned = await ephemeral(api, model_id, 0, 1)
    moving = await ephemeral(api, model_id, 1, 2, kind="inflight")
    before = await probe(api, moving)
    assert before == await probe(api, pinned)
    await api.train(model_id, 3)
    newer = await ephemeral(api, model_id, 2, 5, kind="inflight")
    assert await probe(api, moving) == await probe(api, newer) != before
    assert await probe(api, pinned) == before
    assert api.services.backend.stats()["num_versions"] == 2


async def test_both_kinds_of_checkpoints_can_be_sampled(api: Api) -> None:
    session_id = await api.session()
    model_id = await api.model(session_id)
    await api.train(model_id, 1)
    live = await ephemeral(api, model_id, 9, 3)
    kinds = ("save_weights", "save_weights_for_sampler")
    for number, kind in enumerate(kinds):
        accepted = await api.ok(kind, model_id=model_id, path="s", seq_id=4 + number)
        path = (await api.result(accepted))["path"]
        sampler_id = await api.sampler(session_id, number, model_path=path)
        assert (await api.get(f"samplers/{sampler_id}")).json()["model_path"] == path
        assert await probe(api, sampler_id) == await probe(api, live)


async def test_two_sessions_of_one_checkpoint_share_a_version(api: Api) -> None:
    model_id = await api.model()
    accepted = await api.ok("save_weights_for_sampler", model_id=model_id, path="s", seq_id=1)
    path = (await api.result(accepted))["path"]
    sessions = [await api.session(), await api.session()]
    for session_id in sessions:
        await tokens(api, await api.sampler(session_id, model_path=path))
    versions = lambda: api.services.backend.stats()["num_versions"]  # noqa: E731
    assert versions() == 1
    for left, session_id in ((1, sessions[0]), (0, sessions[1])):
        await api.ok(f"sessions/{session_id}/finish", reason={"type": "success"}, detail=None)
        assert versions() == left


async def test_after_a_restart_samplers_give_what_they_gave(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        session_id = await api.session()
        model_id = await api.model(session_id)
        await api.train(model_id, 1)
        live = await ephemeral(api, model_id, 0, 3)
        accepted = await api.ok("save_weights_for_sampler", model_id=model_id, path="s", seq_id=4)
        path = (await api.result(accepted))["path"]
        saved = await api.sampler(session_id, 1, model_path=path)
        base = await api.sampler(session_id, 2)
        samplers = (live, saved, base)
        before = [await probe(api, sampler_id) for sampler_id in samplers]
    async with serving(tmp_path) as api:
        assert [await probe(api, sampler_id) for sampler_id in samplers] == before


async def test_versions_are_published_again_when_the_engine_lost_them(api: Api) -> None:
    session_id = await api.session()
    base = await api.sampler(session_id)
    live = await ephemeral(api, await api.model(session_id), 1, 1)
    before = await probe(api, base)
    for version in [f"fake-version-{n}" for n in range(10)]:
        await api.services.backend.release(version)
    assert await probe(api, base) == before
    assert "publish it again" in await api.failure(await api.sample(live), "server")


async def test_the_same_seed_gives_the_same_tokens_alone_and_in_company(api: Api) -> None:
    sampler_id = await api.sampler(await api.session())
    seeded = {"sampling_params": {"max_tokens": 8, "seed": 5}}
    alone = await tokens(api, sampler_id, **seeded)
    crowd = [await api.sample(sampler_id, sampling_params={"max_tokens": 8}) for _ in range(16)]
    assert await tokens(api, sampler_id, **seeded) == alone
    drawn = {tuple((await api.result(a)).sequences[0].tokens.tolist()) for a in crowd}
    assert len(drawn) > 8  # an absent seed is a drawn one


@pytest.mark.parametrize("seed", [-1, 2**64, 10**40, 0])
async def test_any_integer_is_a_seed(api: Api, seed: int) -> None:
    sampler_id = await api.sampler(await api.session())
    params = {"max_tokens": 6, "seed": seed}
    first, second = [await tokens(api, sampler_id, sampling_params=params) for _ in range(2)]
    assert first == second


async def test_prompt_logprobs_have_the_length_of_the_prompt(api: Api) -> None:
    sampler_id = await api.sampler(await api.session())
    accepted = await api.sample(sampler_id, prompt_logprobs=True, prompt_logprobs_last_n=1)
    logprobs = (await api.result(accepted)).prompt_logprobs
    assert np.isnan(logprobs).tolist() == [True, True, False]


async def test_target_prompt_logprobs_score_the_asked_tokens(api: Api) -> None:
    sampler_id = await api.sampler(await api.session())
    targets = {"data": [2, -1, 3, 7], "dtype": "int64", "shape": [2, 2]}
    accepted = await api.sample(sampler_id, prompt_logprobs=True, target_prompt_logprobs=targets)
    output = await api.result(accepted)
    scored = output.target_prompt_logprobs
    assert scored.shape == (2, 2)
    assert scored[0, 0] == output.prompt_logprobs[1]
    assert scored[1, 0] == output.prompt_logprobs[2]
    assert scored[0, 1] == 0.0


async def test_topk_comes_for_prompt_and_samples(api: Api) -> None:
    sampler_id = await api.sampler(await api.session())
    accepted = await api.sample(sampler_id, topk_prompt_logprobs=2, topk_sample_logprobs=3)
    output = await api.result(accepted)
    assert output.topk_prompt_logprobs.token_ids.shape == (3, 2)
    assert output.topk_prompt_logprobs.logprobs[0].tolist() == [-99999.0, -99999.0]
    [sequence] = output.sequences
    assert sequence.topk.token_ids[:, 0].tolist() == sequence.tokens.tolist()


async def test_stop_tokens_end_a_sequence_and_are_part_of_it(api: Api) -> None:
    sampler_id = await api.sampler(await api.session())
    greedy = {"temperature": 0.0, "max_tokens": 8, "stop": []}
    free = await tokens(api, sampler_id, sampling_params=greedy)
    assert len(free) == 8
    for stop in ([free[2]], [f"{free[2]} "], f" {free[2]} "):
        accepted = await api.sample(sampler_id, sampling_params=greedy | {"stop": stop})
        [sequence] = (await api.result(accepted)).sequences
        assert sequence.tokens.tolist() == free[: free.index(free[2]) + 1]
        assert sequence.stop_reason == "stop"


async def test_without_max_tokens_the_context_is_the_limit(api: Api) -> None:
    sampler_id = await api.sampler(await api.session())
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1] * 2040}]}
    params = {"stop": [], "temperature": 0}
    assert len(await tokens(api, sampler_id, prompt=prompt, sampling_params=params)) == 8


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": {"chunks": []}},
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": []}]}},
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1] * 2048}]}},
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1000]}]}},
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [-1]}]}},
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [10**30]}]}},
        {"prompt": {"chunks": [{"type": "image", "data": "aGk=", "format": "png"}]}},
        {"prompt": {"chunks": [{"type": "dmel", "dmel": "aGk="}]}},
        {"sampling_params": {"max_tokens": 0}},
        {"sampling_params": {"max_tokens": -3}},
        {"sampling_params": {"temperature": -0.1}},
        {"sampling_params": {"top_p": 0.0}},
        {"sampling_params": {"top_p": 1.1}},
        {"sampling_params": {"top_k": 0}},
        {"sampling_params": {"top_k": -2}},
        {"sampling_params": {"min_p": -0.1}},
        {"sampling_params": {"min_p": 1.1}},
        {"sampling_params": {"presence_penalty": 2.1}},
        {"sampling_params": {"frequency_penalty": -2.1}},
        {"sampling_params": {"stop": ""}},
        {"sampling_params": {"stop": ["a", ""]}},
        {"sampling_params": {"stop": [1000]}},
        {"sampling_params": {"stop": [10**30]}},
        {"prompt_logprobs_last_n": 0},
        {"prompt_logprobs_last_n": 3},
        {"topk_prompt_logprobs": -1},
        {"topk_prompt_logprobs": 1001},
        {"topk_sample_logprobs": 10**12},
        {"prompt_alt_tokens_k": -1},
        {"prompt_alt_tokens_k": 10**9},
        {"target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [1, 2]}},
        {"target_prompt_logprobs": {"data": [1, 2], "dtype": "int64"}},
        {"target_prompt_logprobs": {"data": [1, 1000], "dtype": "int64", "shape": [2, 1]}},
        {"target_prompt_logprobs": {"data": [1.0, 2.0], "dtype": "float32", "shape": [2, 1]}},
    ],
    ids=str,
)
async def test_a_request_that_cannot_be_sampled_fails_as_the_users_fault(
    api: Api, fields: dict[str, Any]
) -> None:
    sampler_id = await api.sampler(await api.session())
    assert await api.failure(await api.sample(sampler_id, **fields))
    assert await tokens(api, sampler_id)


async def test_a_prompt_that_is_too_long_fails_with_its_number_of_tokens_and_takes_the_number(
    api: Api,
) -> None:
    sampler_id = await api.sampler(await api.session())
    prompts = [
        {"chunks": [{"type": "encoded_text", "tokens": [1] * length}]} for length in (5000, 6000)
    ]
    sent = await api.sample(sampler_id, seq_id=0, prompt=prompts[0], num_samples=2)
    assert len(sent["sample_sequence_ids"]) == 2
    assert "5000 tokens" in await api.failure(sent)
    again = await api.sample(sampler_id, seq_id=0, prompt=prompts[0], num_samples=2)
    assert again["request_id"] == sent["request_id"]
    for other in ({"prompt": prompts[1]}, {}):
        refused = await api.failure(await api.sample(sampler_id, seq_id=0, **other))
        assert "was taken by another request" in refused


async def test_min_p_and_penalties_shape_what_is_sampled(api: Api) -> None:
    """min_p 1 leaves the likeliest token; a penalty moves a greedy sample on from what it has."""
    sampler_id = await api.sampler(await api.session())

    async def draw(**params: float) -> list[int]:
        params = {"max_tokens": 40, "seed": 1, "stop": [], **params}
        return await tokens(api, sampler_id, sampling_params=params)

    greedy = await draw(temperature=0)
    assert await draw(min_p=1.0) == greedy
    assert await draw(min_p=0.0) == await draw() != greedy
    penalized = await draw(temperature=0, presence_penalty=2.0, frequency_penalty=2.0)
    assert len(set(penalized)) > len(set(greedy))


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty"])
async def test_numbers_that_are_none_fail_as_the_users_fault(
    api: Api, text: str, name: str
) -> None:
    sampler_id = await api.sampler(await api.session())
    body = (
        f'{{"sampling_session_id": "{sampler_id}", "sampling_params": {{"{name}": {text}}},'
        '"prompt": {"chunks": [{"tokens": [1]}]}}'
    )
    headers = {"content-type": "application/json"}
    response = await api.http.post("/api/v1/asample", content=body, headers=headers)
    assert response.status_code == 422 or await api.failure(response.json())


@pytest.mark.parametrize("num_samples", [0, -1, 1025, 10**30])
async def test_a_wrong_number_of_samples_is_refused(api: Api, num_samples: int) -> None:
    sampler_id = await api.sampler(await api.session())
    body = {"sampling_session_id": sampler_id, "prompt": {"chunks": [{"tokens": PROMPT}]}}
    response = await api.post("asample", **body, num_samples=num_samples)
    assert response.status_code == 422


async def test_unknown_samplers_and_weights_are_refused(api: Api) -> None:
    prompt = {"chunks": [{"tokens": PROMPT}]}
    assert (await api.post("asample", prompt=prompt, sampling_session_id="x")).status_code == 404
    assert (await api.post("asample", prompt=prompt)).status_code == 422
    assert (await api.post("asample", prompt=prompt, base_model="no/such")).status_code == 400
    assert (await api.get("samplers/x")).status_code == 404
    body = {"session_id": await api.session(), "sampling_session_seq_id": 0}
    create = "create_sampling_session"
    assert (await api.post(create, **body)).status_code == 422
    assert (await api.post(create, **body, base_model="no/such")).status_code == 400
    path = "tinker://a:train:0/weights/x"
    assert (await api.post(create, **body, model_path=path)).status_code == 404


async def test_another_users_sampler_does_not_exist(api: Api) -> None:
    bob = api.as_user("bob")
    session_id = await api.session()
    sampler_id = await api.sampler(session_id)
    assert (await bob.get(f"samplers/{sampler_id}")).status_code == 404
    prompt = {"chunks": [{"tokens": PROMPT}]}
    body = {"prompt": prompt, "sampling_session_id": sampler_id}
    assert (await bob.post("asample", **body)).status_code == 404
    create = {"session_id": session_id, "sampling_session_seq_id": 1, "base_model": "fake/tiny"}
    assert (await bob.post("create_sampling_session", **create)).status_code == 404


async def test_weights_can_be_sampled_without_a_session(api: Api) -> None:
    model_id = await api.model()
    await api.train(model_id, 1)
    live = await ephemeral(api, model_id, 0, 3)
    accepted = await api.ok("save_weights_for_sampler", model_id=model_id, path="s", seq_id=4)
    path = (await api.result(accepted))["path"]
    body = {"prompt": {"chunks": [{"tokens": PROMPT}]}, "prompt_logprobs": True}
    body |= {"sampling_params": {"max_tokens": 1}}
    direct = await api.result(await api.ok("sample", **body, model_path=path))
    assert direct.prompt_logprobs.tobytes() == await probe(api, live)
    base = await api.result(await api.ok("asample", **body, base_model="fake/tiny"))
    assert base.prompt_logprobs.tobytes() != direct.prompt_logprobs.tobytes()
    assert math.isfinite(base.sequences[0].logprobs[0])


async def test_create_sampling_client_needs_no_session(api: Api) -> None:
    session = await api.ok("create_sampling_client", base_model="fake/tiny")
    assert len(await tokens(api, session["sampling_session_id"])) == 2
    session_id = await api.session()
    counted = {"session_id": session_id, "sampling_session_seq_id": 4, "base_model": "fake/tiny"}
    session = await api.ok("create_sampling_client", **counted)
    assert session["sampling_session_id"] == f"{session_id}:sample:4"


async def test_a_sampler_id_never_changes_its_weights(api: Api) -> None:
    session_id = await api.session()
    model_id = await api.model(session_id)
    sampler_id = await api.sampler(session_id, 0)
    assert await api.sampler(session_id, 0) == sampler_id  # the same request again
    body = {"model_id": model_id, "sampling_session_seq_id": 0}
    accepted = await api.ok("save_weights_for_sampler", **body, seq_id=1)
    assert "exists already" in await api.failure(accepted)
    saved = await api.ok("save_weights_for_sampler", model_id=model_id, path="s", seq_id=2)
    path = (await api.result(saved))["path"]
    other = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": path}
    assert (await api.post("create_sampling_session", **other)).status_code == 422


async def test_a_deleted_checkpoint_is_sampled_while_its_version_lives(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        model_id = await api.model()
        saved = await api.ok("save_weights_for_sampler", model_id=model_id, path="s", seq_id=1)
        path = (await api.result(saved))["path"]
        sampler_id = await api.sampler(await api.session(), model_path=path)
        before = await probe(api, sampler_id)
        url = f"/api/v1/training_runs/{model_id}/checkpoints/sampler_weights/s"
        assert (await api.http.delete(url)).status_code == 204
        assert await probe(api, sampler_id) == before
    async with serving(tmp_path) as api:
        assert "does not exist" in await api.failure(await api.sample(sampler_id))


async def test_a_session_may_do_without_drafts_or_ask_where_they_are_wrong(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculates: list[bool] = []
    details_for: list[str] = []
    plain = FakeBackend.sample

    async def sample(
        self: FakeBackend, version: str, request: SampleRequest, on_tokens: OnTokens | None = None
    ) -> SampleOutput:
        speculates.append(request.speculate)
        details_for.append(request.details_for)
        return await plain(self, version, request, on_tokens)

    monkeypatch.setattr(FakeBackend, "sample", sample)
    session_id = await api.session()
    for number, more in enumerate(({}, {"speculate": False}, {"speculate": True})):
        body = {"session_id": session_id, "sampling_session_seq_id": number, **more}
        session = await api.ok("create_sampling_session", base_model="fake/tiny", **body)
        await tokens(api, session["sampling_session_id"])
    session = await api.ok("create_sampling_client", base_model="fake/tiny", speculate=False)
    await tokens(api, session["sampling_session_id"])
    assert speculates == [True, False, True, False]
    session = await api.ok("create_sampling_client", base_model="fake/tiny", detailed=True)
    await tokens(api, session["sampling_session_id"])
    assert details_for == ["", "", "", "", session["sampling_session_id"]]


async def test_metrics_are_lines_that_prometheus_reads(api: Api) -> None:
    answer = await api.as_user("eve").http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = answer.text.splitlines()
    assert any(line.startswith("tinkercloud_requests_pending ") for line in lines)
    for line in lines:
        assert line.startswith(("# TYPE ", "# HELP ")) or math.isfinite(
            float(line.rsplit(" ", 1)[1])
        )


class DeletesWhatItReads(FakeBackend):
    """before_read: called as a checkpoint is about to be read."""

    before_read: Callable[[], Awaitable[Any]]

    async def publish(self, source: WeightsSource) -> str:
        if isinstance(source, FromCheckpoint):
            await self.before_read()
        return await super().publish(source)


async def test_a_checkpoint_that_is_deleted_while_a_sample_reads_it_is_said_to_be_gone(
    tmp_path: Path,
) -> None:
    backend = DeletesWhatItReads(Config(backend="fake"))
    async with serving(tmp_path, backend=backend) as api:
        model_id = await api.model()
        saved = await api.ok("save_weights", model_id=model_id, path="gone", seq_id=1)
        path = (await api.result(saved))["path"]
        url = f"/api/v1/training_runs/{model_id}/checkpoints/weights/gone"
        backend.before_read = lambda: api.http.delete(url)
        sampler = await api.sampler(await api.session(), model_path=path)
        text = await api.failure(await api.sample(sampler))
        assert text == f"checkpoint {path!r} does not exist"


class SlowToPublish(FakeBackend):
    def __init__(self) -> None:
        super().__init__(Config(backend="fake"))
        self.begun, self.gate, self.published = (asyncio.Event() for _ in range(3))

    async def publish(self, source: WeightsSource) -> str:
        self.begun.set()
        await self.gate.wait()
        version = await super().publish(source)
        self.published.set()
        return version


async def test_weights_whose_session_ends_while_they_are_published_are_released(
    tmp_path: Path,
) -> None:
    backend = SlowToPublish()
    async with serving(tmp_path, backend=backend) as api, asyncio.timeout(60):
        session = await api.session()
        await api.sample(await api.sampler(session))
        await backend.begun.wait()
        await api.ok(f"sessions/{session}/finish", reason={"type": "success"})
        backend.gate.set()
        await backend.published.wait()
        await async_wait_for(
            "no version is left",
            lambda: backend.stats()["num_versions"],
            lambda num_versions: num_versions == 0,
        )
