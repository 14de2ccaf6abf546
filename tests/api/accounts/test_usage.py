"""Usage is counted from the tokens that were sent and received. The audit log."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import tinker
from click.testing import CliRunner
from tinker import types
from tinker.cli.__main__ import main_cli as cli

from tests.api.harness import Api, serving, wire_datum, without_background
from tests.api.thread_server import DATA, thread_server
from tests.storage.counting import commits_of
from tests.waiting import async_wait_for
from tinkercloud.storage.keys import KeyStore

HOUR = timedelta(hours=1)


def window() -> tuple[str, str]:
    """From the hour before this one to the end of the next: a test may run across an hour."""
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return (now - HOUR).isoformat(), (now + 2 * HOUR).isoformat()


async def usage(api: Api) -> list[dict[str, Any]]:
    starting_on, ending_before = window()
    response = await api.get(
        "billing/usage/events", starting_on=starting_on, ending_before=ending_before
    )
    assert response.status_code == 200, response.text
    return response.json()["data"]


def counted(events: list[dict[str, Any]]) -> dict[str, int]:
    """Tokens by kind; prefill from the cache apart."""
    totals: dict[str, int] = {}
    for event in events:
        info = event["event_info"]
        if "token_count" in info:
            kind = info["type"] + ("_cached" if info.get("cached") else "")
            totals[kind] = totals.get(kind, 0) + info["token_count"]
    return totals


async def test_every_token_is_counted_where_it_belongs(api: Api) -> None:
    session_id = await api.session()
    model = await api.model(session_id)
    data = [wire_datum([1, 2, 3]), wire_datum([4, 5, 6, 7, 8])]
    await api.result(await api.forward_backward(model, 1, data))
    await api.result(await api.forward_backward(model, 2, data, forward_only=True))
    await api.result(await api.optim_step(model, 3))
    sampler = await api.sampler(session_id)
    drawn = await api.result(await api.sample(sampler, num_samples=3))
    events = await usage(api)
    assert counted(events) == {
        "training": 16,
        "sampling_prefill": 3,
        "sampling_sample": sum(len(sequence.tokens) for sequence in drawn.sequences),
    }
    for event in events:
        start = datetime.fromisoformat(event["bucket_start"])
        assert datetime.fromisoformat(event["bucket_end"]) - start == HOUR
        assert (start.minute, start.second) == (0, 0)
        assert (event["user_id"], event["user_name"]) == ("tml:organization_user:ann", "ann")
        assert (event["session_id"], event["base_model"]) == (session_id, "fake/tiny")
        assert event["project_id"] == "default"


async def test_what_failed_or_was_sent_twice_is_not_counted(api: Api) -> None:
    model = await api.model()
    await api.failure(await api.forward_backward(model, 1, loss_fn="nonsense"))
    for _ in range(3):
        await api.result(await api.forward_backward(model, 2))
    assert counted(await usage(api)) == {"training": 4}


async def test_prompt_tokens_from_the_cache_are_counted_apart(api: Api) -> None:
    run = api.services.backend.sample

    async def sample(version, request, on_tokens=None):
        output = await run(version, request, on_tokens)
        object.__setattr__(output, "prompt_cache_hit_tokens", 2)
        return output

    api.services.backend.sample = sample  # type: ignore[method-assign]
    await api.result(await api.sample(await api.sampler(await api.session())))
    totals = counted(await usage(api))
    assert (totals["sampling_prefill"], totals["sampling_prefill_cached"]) == (1, 2)


async def test_nobody_sees_the_usage_of_others(api: Api) -> None:
    bob = api.as_user("bob")
    await api.result(await api.forward_backward(await api.model(), 1))
    await bob.result(await bob.forward_backward(await bob.model(), 1, [wire_datum([1, 2])]))
    assert counted(await usage(api)) == {"training": 4}
    assert counted(await usage(bob)) == {"training": 2}


async def test_counts_survive_a_restart_and_grow(tmp_path: Path) -> None:
    for total in (4, 8):
        async with serving(tmp_path) as api:
            await api.result(await api.forward_backward(await api.model(), 1))
        async with serving(tmp_path) as api:
            assert counted(await usage(api)) == {"training": total}


async def test_counting_costs_a_request_no_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_background(monkeypatch)
    async with serving(tmp_path) as api:
        sampler = await api.sampler(await api.session())
        await api.result(await api.sample(sampler))
        await api.services.usage.flush()
        commits = commits_of(api.services.database)
        await api.result(await api.sample(sampler))
        statements = [sql for (group,) in commits for write in group for sql, _ in write.statements]
        assert len(statements) == 2, "the row, and its result"
        await api.services.usage.flush()
        await api.services.usage.flush()  # nothing is left to write
        assert len([write for (group,) in commits for write in group]) == 3


async def test_counts_reach_the_disk_within_seconds(api: Api) -> None:
    await api.result(await api.forward_backward(await api.model(), 1))
    query = "SELECT SUM(num_tokens) AS num FROM token_usage"
    await async_wait_for(
        "four tokens are on record",
        lambda: api.services.database.one(query),
        lambda row: row is not None and row["num"] == 4,
    )


async def test_a_count_that_cannot_be_written_is_kept(api: Api) -> None:
    await api.result(await api.forward_backward(await api.model(), 1))
    await api.services.usage.flush()
    await api.result(await api.forward_backward(await api.model(), 1))
    write = api.services.database.write

    async def full(*arguments: object) -> None:
        raise OSError("the disk is full")

    api.services.database.write = full  # type: ignore[method-assign]
    with pytest.raises(OSError, match="full"):
        await api.services.usage.flush()
    api.services.database.write = write  # type: ignore[method-assign]
    assert counted(await usage(api)) == {"training": 8}


# checkpoints


def stored(events: list[dict[str, Any]], kind: str, field: str) -> float:
    return sum(e["event_info"][field] for e in events if e["event_info"]["type"] == kind)


async def save(api: Api, model: str, seq_id: int, name: str, **fields: Any) -> None:
    body = {"model_id": model, "seq_id": seq_id, "path": name, **fields}
    assert "path" in await api.result(await api.ok("save_weights", **body))


async def size_of(api: Api) -> int:
    return sum(c["size_bytes"] for c in (await api.get("checkpoints")).json()["checkpoints"])


async def test_storage_is_counted_in_gigabyte_hours_while_a_checkpoint_is_there(api: Api) -> None:
    model = await api.model()
    await save(api, model, 1, "a")
    size = await size_of(api)
    shift = "UPDATE storage_periods SET began_at = began_at - ?"
    await api.services.database.write(shift, 1800.0)
    events = await usage(api)
    assert stored(events, "checkpoint", "count") == 1
    assert stored(events, "storage", "gigabyte_hours") == pytest.approx(size * 0.5e-9, rel=0.02)
    path = f"/api/v1/training_runs/{model}/checkpoints/weights/a"
    assert (await api.http.delete(path)).status_code == 204
    before = await usage(api)
    await api.services.database.write("UPDATE storage_periods SET ended_at = ended_at - 900")
    after = stored(await usage(api), "storage", "gigabyte_hours")
    assert after == pytest.approx(size * 0.25e-9, rel=0.03)
    assert stored(before, "storage", "gigabyte_hours") > after
    assert (await api.get("billing/usage/checkpoints/current")).json()["data"] == []


async def test_storage_is_cut_at_the_hours(api: Api) -> None:
    await save(api, await api.model(), 1, "a")
    await api.services.database.write(
        "UPDATE storage_periods SET began_at = began_at - 7200, size_bytes = 1000000000"
    )
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - HOUR
    response = await api.get(
        "billing/usage/events",
        starting_on=hour.isoformat(),
        ending_before=(hour + HOUR).isoformat(),
    )
    [event] = response.json()["data"]  # the whole hour before this one, and no checkpoint made
    assert event["event_info"]["gigabyte_hours"] == pytest.approx(1.0)


async def test_a_replaced_checkpoint_ends_and_the_new_one_begins(api: Api) -> None:
    model = await api.model()
    await save(api, model, 1, "a")
    await save(api, model, 2, "a", overwrite=True)
    rows = await api.services.database.all("SELECT ended_at FROM storage_periods ORDER BY began_at")
    assert [row["ended_at"] is None for row in rows] == [False, True]
    assert stored(await usage(api), "checkpoint", "count") == 2


async def test_current_storage_by_project(api: Api) -> None:
    bob = api.as_user("bob")
    inside = (await api.ok("create_session", tags=[], project_id="p"))["session_id"]
    await save(api, await api.model(inside), 1, "a")
    await save(api, await api.model(), 1, "a")
    await save(bob, await bob.model(), 1, "a")
    items = (await api.get("billing/usage/checkpoints/current")).json()["data"]
    assert [item["project_id"] for item in items] == ["default", "p"]
    assert sum(item["size_bytes"] for item in items) == await size_of(api)
    assert all(item["checkpoint_count"] == 1 for item in items)
    assert items[0]["size_gigabytes"] == items[0]["size_bytes"] / 1e9
    [item] = (await api.get("billing/usage/checkpoints/current", project_id="p")).json()["data"]
    assert item == items[1]


async def test_checkpoints_of_earlier_versions_are_counted_from_their_time_on(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as api:
        await save(api, await api.model(), 1, "a")
        await api.services.database.write("DROP TABLE storage_periods")
        await api.services.database.write("PRAGMA user_version = 0")
    async with serving(tmp_path) as api:
        [item] = (await api.get("billing/usage/checkpoints/current")).json()["data"]
        assert item["size_bytes"] == await size_of(api)


@pytest.mark.parametrize(
    ("starting_on", "ending_before", "status"),
    [
        ("2026-01-01T00:30:00Z", "2026-01-01T01:00:00Z", 400),
        ("2026-01-01T00:00:00Z", "2026-01-01T00:00:00Z", 400),
        ("2026-01-02T00:00:00Z", "2026-01-01T00:00:00Z", 400),
        ("2026-01-01T00:00:00Z", "2026-01-15T01:00:00Z", 400),
        ("2999-01-01T00:00:00Z", "2999-01-02T00:00:00Z", 400),
        ("2026-01-01T00:00:00", "2026-01-02T00:00:00", 422),
        ("yesterday", "today", 422),
    ],
)
async def test_a_faulty_window_is_refused(
    api: Api, starting_on: str, ending_before: str, status: int
) -> None:
    window = {"starting_on": starting_on, "ending_before": ending_before}
    assert (await api.get("billing/usage/events", **window)).status_code == status


# the audit log


async def events_of(api: Api, **query: str) -> list[tuple[str, dict[str, Any]]]:
    entries = (await api.get("audit", **query)).json()["entries"]
    return [(entry["event"], entry["event_details"]) for entry in entries]


async def test_projects_and_keys_are_audited(api: Api) -> None:
    session_id = await api.session()
    path = f"/api/v1/sessions/{session_id}/project"
    await api.http.put(path, json={"project_id": "p"})
    details = {"actor": "ann", "project_id": "p", "session_id": session_id}
    assert await events_of(api, event_type="projects") == [("project_session_assigned", details)]
    store = KeyStore(api.services.config.data_dir)
    store.add("ann", name="tinker-cli-x")
    [*_, key] = [key for key in store.list() if key.user == "ann"]
    store.revoke(key.key_id)
    store.close()
    keys = [event for event, _ in await events_of(api, event_type="organizations")]
    assert keys == [*["api_key_created"] * 3, "api_key_deleted"]  # two of them by the harness
    assert len(await events_of(api)) == 5
    assert await events_of(api, event_type="teams") == []


async def test_what_is_done_to_a_checkpoint_is_audited(api: Api) -> None:
    bob = api.as_user("bob")
    model = await api.model()
    await save(api, model, 1, "a")
    path = f"training_runs/{model}/checkpoints/weights/a"
    assert (await api.post(f"{path}/publish")).status_code == 204
    await api.http.put(f"/api/v1/{path}/ttl", json={"ttl_seconds": 3600})
    source = f"tinker://{model}/weights/a"
    copied = await bob.ok("copy_weights", source_path=source, destination_project_id="p")
    assert (await bob.get(f"{path}/archive")).status_code == 302
    await api.http.delete(f"/api/v1/{path}/publish")
    await api.http.delete(f"/api/v1/{path}")
    entries = await events_of(api, event_type="checkpoints")
    assert [(event, details["actor"]) for event, details in entries] == [
        ("checkpoint_saved", "ann"),
        ("checkpoint_published", "ann"),
        ("checkpoint_ttl_set", "ann"),
        ("checkpoint_read", "bob"),
        ("checkpoint_downloaded", "bob"),
        ("checkpoint_unpublished", "ann"),
        ("checkpoint_deleted", "ann"),
    ]
    assert {details["tinker_path"] for _, details in entries} == {source}
    [(event, details)] = await events_of(bob, event_type="checkpoints")
    assert (event, details["tinker_path"]) == ("checkpoint_copied", copied["tinker_path"])
    assert details["source"] == source
    [entry, *_] = (await api.get("audit", event_type="checkpoints")).json()["entries"]
    assert (entry["model_id"], entry["tinker_path"]) == (model, source)


async def test_an_expired_checkpoint_is_audited_as_deleted_by_the_server(api: Api) -> None:
    await save(api, await api.model(), 1, "a", ttl_seconds=3600)
    await api.services.database.write("UPDATE checkpoints SET expires_at = 1.0")
    await api.services.checkpoints.remove_expired()
    event, details = (await events_of(api, event_type="checkpoints"))[-1]
    assert (event, details["actor"], details["reason"]) == (
        "checkpoint_deleted",
        "server",
        "expired",
    )


async def test_nobody_reads_the_audit_log_of_others(api: Api) -> None:
    path = f"/api/v1/sessions/{await api.session()}/project"
    await api.http.put(path, json={"project_id": "p"})
    assert await events_of(api.as_user("bob"), event_type="projects") == []


async def test_the_audit_log_of_a_day(api: Api) -> None:
    today = datetime.now(UTC).date()
    yesterday = today - timedelta(days=1)
    assert len(await events_of(api, day=today.isoformat())) == 2  # the keys of ann
    assert await events_of(api, day=yesterday.isoformat()) == []
    await api.services.database.write("UPDATE audit_log SET at = at - 86400")
    assert len(await events_of(api, day=yesterday.isoformat())) == 2
    assert (await api.get("audit", day="someday")).status_code == 422
    assert (await api.get("audit", event_type="weather")).status_code == 422


# the official client and its command line


def test_the_sdk_reads_what_it_has_used(tmp_path: Path) -> None:
    with thread_server(tmp_path) as (base_url, key):
        service = tinker.ServiceClient(base_url=base_url, api_key=key, user_metadata={"k": "v"})
        training = service.create_lora_training_client("fake/tiny", rank=4).result()
        training.forward_backward(DATA, "cross_entropy").result()
        training.forward_backward_custom(
            DATA, lambda data, logprobs: (sum(x.sum() for x in logprobs), {})
        ).result()
        training.save_state("a").result()
        sampler = training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=7)
        prompt = types.ModelInput.from_ints(list(range(11)))
        answers = [sampler.sample(prompt, 3, params).result() for _ in range(4)]
        num_sampled = sum(len(s.tokens) for answer in answers for s in answer.sequences)
        service.close("success").result()
        admin = tinker.AdminClient(base_url=base_url, api_key=key)
        response = admin.get_billing_usage(*window()).result()
        events = [event.model_dump(mode="json") for event in response.data]
        num_trained = 3 * sum(datum.model_input.length for datum in DATA)  # custom: two passes
        assert counted(events) == {
            "training": num_trained,
            "sampling_prefill": 4 * 11,
            "sampling_sample": num_sampled,
        }
        assert stored(events, "checkpoint", "count") == 1
        [session] = response.sessions.values()
        assert session.user_metadata == {"k": "v"}
        current = admin.get_current_checkpoint_storage_usage().result()
        assert [item.checkpoint_count for item in current.data] == [1]
        assert admin.get_audit_log(day=datetime.now(UTC).date()).result().entries


def test_the_command_line_shows_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with thread_server(tmp_path) as (base_url, key):
        monkeypatch.setenv("TINKER_BASE_URL", base_url)
        monkeypatch.setenv("TINKER_API_KEY", key)
        service = tinker.ServiceClient()
        training = service.create_lora_training_client("fake/tiny", rank=4).result()
        training.forward_backward(DATA, "cross_entropy").result()
        training.save_state("a").result()
        service.close("success").result()

        def run(*arguments: str) -> str:
            result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
            assert result.exit_code == 0, result.output
            return result.output

        usage = json.loads(run("--format", "json", "billing", "usage", *window()))
        assert counted(usage["data"]) == {"training": sum(d.model_input.length for d in DATA)}
        assert "training" in run("billing", "usage", *window(), "--csv", "-")
        storage = json.loads(run("--format", "json", "billing", "checkpoint-storage"))
        assert storage["data"][0]["checkpoint_count"] == 1
