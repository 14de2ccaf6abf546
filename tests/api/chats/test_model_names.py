"""What `model` of the OpenAI and Anthropic routes stands for, and what is kept for it."""

import pytest

from tests.api.harness import Api
from tinkercloud.services.chats import model_names


async def saved(api: Api, model_id: str, name: str, seq_id: int) -> str:
    body = {"model_id": model_id, "path": name, "seq_id": seq_id}
    return (await api.result(await api.ok("save_weights_for_sampler", **body)))["path"]


async def complete(api: Api, model: str) -> int:
    body = {"model": model, "prompt": [1, 2], "max_tokens": 2}
    return (await api.http.post("/oai/api/v1/completions", json=body)).status_code


@pytest.mark.parametrize(
    "name",
    [
        "",
        "nothing",
        "tinker://",
        "tinker://RUN/sampler_weights/NAME",
        "fake/tiny;nothing",
        "nothing;tinker://RUN/sampler_weights/NAME",
        "a:sample:0",
        "../../etc/passwd",
        "fake/tiny;",
    ],
)
async def test_a_name_of_nothing_is_not_found(api: Api, name: str) -> None:
    assert await complete(api, name) == 404


async def test_published_weights_answer_others_until_they_are_unpublished(api: Api) -> None:
    path = await saved(api, await api.model(), "shared", 1)
    bob = api.as_user("bob")
    run, name = path.removeprefix("tinker://").split("/", 1)
    url = f"/api/v1/training_runs/{run}/checkpoints/{name}/publish"
    assert await complete(bob, path) == 404
    assert (await api.http.post(url)).is_success
    assert await complete(bob, path) == 200
    assert (await api.http.delete(url)).is_success
    assert await complete(bob, path) == 404


async def test_a_deleted_checkpoint_is_not_found(api: Api) -> None:
    path = await saved(api, await api.model(), "gone", 1)
    assert await complete(api, path) == 200
    run, name = path.removeprefix("tinker://").split("/", 1)
    assert (await api.http.delete(f"/api/v1/training_runs/{run}/checkpoints/{name}")).is_success
    assert await complete(api, path) == 404


async def test_a_finished_session_s_sampler_does_not_answer(api: Api) -> None:
    session_id = await api.session()
    sampler = await api.sampler(session_id)
    assert await complete(api, sampler) == 200
    await api.ok(f"sessions/{session_id}/finish", reason={"type": "success"}, detail=None)
    assert await complete(api, sampler) == 410


async def test_weights_that_nobody_asks_for_any_more_are_released(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_names, "MAX_WEIGHTS", 2)
    model_id = await api.model()
    paths = [await saved(api, model_id, f"c{i}", i + 1) for i in range(5)]
    for path in (*paths, *paths):
        assert await complete(api, path) == 200
    assert api.services.backend.stats()["num_versions"] == 2
