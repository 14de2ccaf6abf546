"""What a key may have and use at a time."""

from pathlib import Path

import pytest

from tests.api.checkpoints.calls import publish, saved
from tests.api.harness import PROTOBUF, Api, body_of, serving, wire_datum
from tinkercloud.core.types import LoraSpec
from tinkercloud.errors import TooManyRequests
from tinkercloud.services.accounts.quotas import Quotas, with_key
from tinkercloud.services.accounts.usage_recorder import UsageRecorder
from tinkercloud.storage.database import Database
from tinkercloud.storage.futures import Ticket
from tinkercloud.storage.keys import KeyRecord, KeyStore
from tinkercloud.storage.metadata import MetadataStorage
from tinkercloud.storage.quota import Quota
from tinkercloud.storage.usage_storage import UsageStorage

NEW = {"base_model": "fake/tiny", "lora_config": {"rank": 8}}


def limited(api: Api, user: str = "kim", **quota: int) -> Api:
    store = KeyStore(api.services.config.data_dir)
    key = store.add(user, quota=Quota(**quota))
    store.close()
    return Api(api.app, api.keys, key)


async def test_models_beyond_the_quota_are_refused_until_one_is_deleted(api: Api) -> None:
    kim = limited(api, models=1)
    session = await kim.session()
    body = {"session_id": session, "model_seq_id": 0, **NEW}
    first = await kim.ok("create_model", **body)
    refused = await kim.post("create_model", **(body | {"model_seq_id": 1}))
    assert refused.status_code == 429
    assert "1 models are live and this key's quota is 1" in refused.json()["detail"]
    assert refused.headers["x-should-retry"] == "false"
    assert await kim.ok("create_model", **body) == first  # a repeat of what was accepted
    _, path = await saved(api)
    await publish(api, path)
    load = {"session_id": session, "model_seq_id": 2, "path": path, "optimizer": False}
    assert (await kim.post("load_weights", **load)).status_code == 429
    await kim.ok("delete_model", model_id=first["model_id"])
    assert (await kim.post("create_model", **(body | {"model_seq_id": 1}))).status_code == 200


async def test_what_counts_is_the_users_by_whichever_key(api: Api) -> None:
    await api.model()
    body = {"session_id": await api.session(), "model_seq_id": 0, **NEW}
    assert (await limited(api, "ann", models=1).post("create_model", **body)).status_code == 429
    assert (await limited(api, "ann", models=2).post("create_model", **body)).status_code == 200
    assert (await api.as_user("bob").get("training_runs")).status_code == 200


async def test_memory_is_counted_by_the_ranks_of_live_models(api: Api) -> None:
    needed = api.services.catalog.get("fake/tiny").training_bytes(LoraSpec(8, 0))
    kim = limited(api, memory_bytes=2 * needed - 1)
    session = await kim.session()
    body = {"session_id": session, "model_seq_id": 0, **NEW}
    await kim.ok("create_model", **body)
    refused = await kim.post("create_model", **(body | {"model_seq_id": 1}))
    assert refused.status_code == 429
    for number in (needed, 2 * needed - 1):
        assert f"{number:,}" in refused.json()["detail"]
    smaller = body | {"model_seq_id": 1, "lora_config": {"rank": 7}}
    assert (await kim.post("create_model", **smaller)).status_code == 200


async def test_operations_beyond_the_quota_wait_for_those_underway(tmp_path: Path) -> None:
    async with serving(tmp_path / "data", gap_grace_s=30.0) as api:
        kim = limited(api, queued=2)
        model = await kim.model()
        sampler = await kim.sampler(await kim.session())
        early = [await kim.forward_backward(model, seq_id) for seq_id in (2, 3)]  # 1 is missing
        body = body_of(model, 4)
        refused = await kim.http.post("/api/v1/forward_backward", content=body, headers=PROTOBUF)
        sample = {"sampling_session_id": sampler, "seq_id": 0, "sampling_params": {"max_tokens": 1},
                  "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}}  # fmt: skip
        chat = {"model": "fake/tiny", "prompt": "x", "max_tokens": 1}
        for answer in (
            refused,
            await kim.post("asample", **sample),
            await kim.http.post("/oai/api/v1/completions", json=chat),
        ):
            assert answer.status_code == 429, answer.text
            assert "2 operations are underway and this key's quota is 2" in answer.text
            assert answer.headers["retry-after"] == "1"
        again = await kim.forward_backward(model, 2)  # a repeat of what was accepted
        assert again["request_id"] == early[0]["request_id"]
        other = limited(api, queued=3)  # of the same user, with room for the missing one
        await other.result(await other.forward_backward(model, 1))
        for accepted in early:
            await kim.result(accepted)
        assert (await kim.post("asample", **sample)).status_code == 200


async def test_checkpoints_beyond_the_quota_fail_and_leave_nothing(api: Api) -> None:
    run, path = await saved(api)
    [row] = await api.services.database.all("SELECT size_bytes FROM checkpoints")
    size = row["size_bytes"]
    ann = limited(api, "ann", checkpoint_bytes=size + size // 2)
    save = {"model_id": run, "path": "second"}
    text = await ann.failure(await ann.ok("save_weights", **save, seq_id=4))
    assert f"{size:,} bytes" in text
    assert f"{size + size // 2:,}" in text
    full = limited(api, "ann", checkpoint_bytes=size)
    assert "quota" in await full.failure(await full.ok("save_weights", **save, seq_id=5))
    copy = {"source_path": path, "destination_project_id": "p"}
    assert (await full.post("copy_weights", **copy)).status_code == 429
    folders = (api.services.config.data_dir / "checkpoints" / run / "weights").iterdir()
    kept = [file for folder in folders for file in folder.iterdir()]
    assert len(kept) == 1
    over = {"model_id": run, "path": "ck1", "overwrite": True}  # what it replaces makes room
    assert (await ann.result(await ann.ok("save_weights", **over, seq_id=6)))["path"] == path


async def test_tokens_beyond_the_quota_are_refused_with_the_time_to_wait(api: Api) -> None:
    kim = limited(api, tokens_per_minute=600)
    sampler = await kim.sampler(await kim.session())
    body = {
        "sampling_session_id": sampler,
        "sampling_params": {"max_tokens": 20},
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1] * 50}]},
    }
    await kim.result(await kim.ok("asample", **body, seq_id=0))
    model = await kim.model()
    long = [wire_datum([1] * 1000)]
    assert (await kim.result(await kim.forward_backward(model, 1, long))).metrics
    answer = await kim.post("asample", **body, seq_id=2)
    assert answer.status_code == 429
    assert "this key's quota of 600 tokens a minute is used up" in answer.json()["detail"]
    assert 30 < int(answer.headers["retry-after"]) <= 60
    chat = {"model": "fake/tiny", "prompt": "x", "max_tokens": 1}
    assert (await kim.http.post("/oai/api/v1/completions", json=chat)).status_code == 429
    free = limited(api)  # the user's other key has no quota
    assert (await free.post("asample", **body, seq_id=2)).status_code == 200


async def test_the_rate_of_tokens_is_the_quota_over_minutes(tmp_path: Path) -> None:
    now_s = 0.0
    database = await Database.open(tmp_path)
    usage = UsageRecorder(UsageStorage(database))
    quotas = Quotas(MetadataStorage(database), usage, lambda: now_s)
    num_requests, num_tokens = 0, 0
    with with_key(KeyRecord("key-1", "kim", b"", quota=Quota(tokens_per_minute=1000))):
        while now_s < 3600:
            try:
                quotas.require("kim")
            except TooManyRequests as error:
                assert 1 <= error.retry_after_s <= 60
                now_s += error.retry_after_s
                continue
            ticket = Ticket("kim", "Sample", num_tokens=300)
            quotas.enter(ticket)
            num_requests += 1
            if num_requests % 3 == 0:  # it failed: what it might have used is there again
                quotas.leave(ticket)
            else:
                num_tokens += 300
            now_s += 0.5
    await database.close()
    # A minute's worth at once and then the rate; the last request may go beyond.
    assert 60_000 < num_tokens <= 61_000 + 300


@pytest.mark.parametrize("quota", [{"queued": 0}, {"tokens_per_minute": 0}])
async def test_a_quota_of_none_lets_nothing_begin(api: Api, quota: dict[str, int]) -> None:
    kim = limited(api, **quota)
    run = await kim.model()  # of models there is no quota
    answer = await kim.post("optim_step", model_id=run, seq_id=1, adam_params={})
    assert answer.status_code == 429
    free = limited(api)
    await free.train(run, 1)  # the refused number is not lost
