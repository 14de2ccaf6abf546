"""Second names of served models: what a client sees is the name that it asked for."""

from pathlib import Path
from typing import Any

import pytest

from tests.api.harness import Api, serving
from tinkercloud.config import ModelAlias
from tinkercloud.errors import ConfigError

ALIAS = "Qwen/Qwen3-4B-Instruct-2507"
ALIASES = (ModelAlias(ALIAS, "fake/tiny"),)


async def sampled(api: Api, sampler_id: str) -> tuple[list[int], list[float]]:
    accepted = await api.sample(sampler_id, sampling_params={"max_tokens": 4, "seed": 3})
    [sequence] = (await api.result(accepted)).sequences
    return sequence.tokens.tolist(), sequence.logprobs.tolist()


async def trained(api: Api, base_model: str) -> tuple[str, float]:
    model_id = await api.model(base_model=base_model, lora_config={"rank": 8, "seed": 1})
    await api.train(model_id, 1)
    return model_id, await api.loss(model_id, 3)


async def saved(api: Api, kind: str, model_id: str, seq_id: int) -> str:
    accepted = await api.ok(kind, model_id=model_id, path="ck", seq_id=seq_id)
    return (await api.result(accepted))["path"]


async def test_an_alias_is_listed_trained_and_sampled_as_a_model(tmp_path: Path) -> None:
    async with serving(tmp_path, aliases=ALIASES) as api:
        capabilities = (await api.get("get_server_capabilities")).json()["supported_models"]
        assert [model["model_name"] for model in capabilities] == ["fake/tiny", ALIAS]
        model_id, loss = await trained(api, ALIAS)
        assert (await trained(api, "fake/tiny"))[1] == loss
        info = await api.ok("get_info", model_id=model_id)
        assert info["model_data"]["model_name"] == ALIAS
        session_id = await api.session()
        samplers = [
            await api.sampler(session_id, number, base_model=name)
            for number, name in enumerate((ALIAS, "fake/tiny"))
        ]
        described = (await api.get(f"samplers/{samplers[0]}")).json()
        assert described["base_model"] == ALIAS
        assert await sampled(api, samplers[0]) == await sampled(api, samplers[1])


async def test_checkpoints_of_an_alias_are_loaded_and_sampled(tmp_path: Path) -> None:
    async with serving(tmp_path, aliases=ALIASES) as api:
        model_id, loss = await trained(api, ALIAS)
        path = await saved(api, "save_weights", model_id, 4)
        sampler_path = await saved(api, "save_weights_for_sampler", model_id, 5)
        assert (await api.ok("weights_info", tinker_path=path))["base_model"] == ALIAS
        run = (await api.get(f"training_runs/{model_id}")).json()
        assert run["base_model"] == ALIAS
        assert (await api.as_user("bob").get(f"training_runs/{model_id}")).status_code == 404
        accepted = await api.ok(
            "load_weights", session_id=await api.session(), model_seq_id=0, path=path
        )
        resumed = (await api.result(accepted))["model_id"]
        assert await api.loss(resumed, 1) == loss
        sampler = await api.sampler(await api.session(), model_path=sampler_path)
        assert len((await sampled(api, sampler))[0]) == 4
        live = await api.ok(
            "save_weights_for_sampler", model_id=model_id, seq_id=6, sampling_session_seq_id=7
        )
        live_id = (await api.result(live))["sampling_session_id"]
        assert await sampled(api, sampler) == await sampled(api, live_id)


async def test_a_name_that_is_no_longer_an_alias_is_refused_with_what_to_do(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, aliases=ALIASES) as api:
        model_id, _ = await trained(api, ALIAS)
        path = await saved(api, "save_weights", model_id, 4)
    async with serving(tmp_path) as api:
        body: dict[str, Any] = {"session_id": await api.session(), "model_seq_id": 0}
        refused = await api.post("load_weights", **body, path=path)
        assert refused.status_code == 400
        assert f"--alias {ALIAS}=SERVED" in refused.json()["detail"]
        accepted = await api.ok("load_weights", **body, path=path, base_model="fake/tiny")
        assert (await api.result(accepted))["type"] == "load_weights"


@pytest.mark.parametrize(
    ("alias", "fault"),
    [
        (ModelAlias("a/b", "c/d"), "which is not served; served: fake/tiny"),
        (ModelAlias("fake/tiny", "fake/tiny"), "is the name of a served model already"),
    ],
)
async def test_an_alias_that_cannot_be_stops_the_start(
    tmp_path: Path, alias: ModelAlias, fault: str
) -> None:
    with pytest.raises(ConfigError, match=fault):
        async with serving(tmp_path, aliases=(alias,)):
            pass
