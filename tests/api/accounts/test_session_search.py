"""Sessions: found again by what is known of them, their states, their projects."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types
from tinker.lib.experimental import ExperimentalWarning

from tests.api.harness import Api, serving
from tests.api.thread_server import thread_server


async def session(api: Api, **fields: Any) -> str:
    return (await api.ok("create_session", tags=[], **fields))["session_id"]


async def found(api: Api, **query: Any) -> list[str]:
    """The ids of all pages, in order."""
    ids: list[str] = []
    while True:
        page = await api.ok("sessions/search", **query)
        ids += [summary["session_id"] for summary in page["sessions"]]
        if "next_cursor" not in page:
            return ids
        query["cursor"] = page["next_cursor"]


async def only(api: Api, **query: Any) -> dict[str, Any]:
    [summary] = (await api.ok("sessions/search", **query))["sessions"]
    return summary


async def silence(api: Api, session_id: str) -> None:
    """Its last heartbeat was an hour ago."""
    await api.services.database.write(
        "UPDATE sessions SET heartbeat_at = heartbeat_at - 3600 WHERE session_id = ?", session_id
    )


async def test_a_summary_has_all_that_is_known(api: Api) -> None:
    session_id = await session(
        api, user_metadata={"k": "v", "n": 3}, project_id="p", display_name="Nightly run"
    )
    model = await api.model(session_id)
    await api.result(await api.ok("save_weights", model_id=model, seq_id=1, path="a"))
    summary = await only(api)
    assert abs(datetime.fromisoformat(summary.pop("created_at")).timestamp() - time.time()) < 60
    assert summary.pop("checkpoint_storage_bytes") > 0
    assert summary == {
        "session_id": session_id,
        "owner": "tml:organization_user:ann",
        "project_id": "p",
        "status": {"type": "active"},
        "state": "active",
        "checkpoints_count": 1,
        "display_name": "Nightly run",
        "user_metadata": {"k": "v", "n": "3"},
    }


async def test_a_session_whose_metadata_is_from_before_nan_was_refused_is_found(api: Api) -> None:
    session_id = await session(api, user_metadata={"x": 1})
    await api.services.database.write(
        """UPDATE sessions SET details = replace(details, '{"x": 1}', '{"x": NaN}')"""
        " WHERE session_id = ?",
        session_id,
    )
    assert (await only(api))["user_metadata"] == {"x": "NaN"}


async def test_the_filters(api: Api) -> None:
    first = await session(api, user_metadata={"a": "1", "b": "2"}, display_name="Red apple pie")
    second = await session(api, user_metadata={"a": "1"}, project_id="fruit", display_name="apples")
    third = await session(api)
    assert await found(api) == [third, second, first]
    assert await found(api, user_metadata={"a": "1"}) == [second, first]
    assert await found(api, user_metadata={"a": "1", "b": "2"}) == [first]
    assert await found(api, user_metadata={"a": "2"}) == []
    assert await found(api, session_id=second) == [second]
    assert await found(api, display_name="APPLE") == [second, first]
    assert await found(api, display_name="pie red") == [first]
    assert await found(api, display_name="pie", session_id=third) == [third, first]
    assert await found(api, project_ids=["fruit"]) == [second]
    assert await found(api, project_ids=["default"]) == [third, first]
    assert await found(api, project_ids=["fruit", "default"]) == [third, second, first]
    assert await found(api, project_ids=["unknown"]) == []


async def test_pages_follow_each_other_without_gap_or_repeat(api: Api) -> None:
    ids = [await session(api, display_name=f"s{i}") for i in range(7)]
    assert await found(api, limit=2) == ids[::-1]
    assert await found(api, limit=7) == ids[::-1]
    now = time.time()
    await api.services.database.write("UPDATE sessions SET created_at = ?", now)
    assert await found(api, limit=3) == sorted(ids)  # of one moment: by id


async def test_a_search_over_many_sessions_reads_on_until_the_page_is_full(api: Api) -> None:
    rare = await session(api, display_name="needle")
    for _ in range(450):
        await api.services.sessions.create("ann", {})
    assert await found(api, display_name="needle") == [rare]


async def test_nobody_finds_the_sessions_of_others(api: Api) -> None:
    session_id = await session(api, project_id="p")
    bob = api.as_user("bob")
    for query in (
        {},
        {"session_id": session_id},
        {"project_ids": ["p"]},
        {"owner": {"type": "accessible"}},
        {"owner": {"type": "user", "owner_urns": ["tml:organization_user:ann"]}},
    ):
        assert await found(bob, **query) == []
    own = {"type": "user", "owner_urns": ["tml:organization_user:x", "tml:organization_user:ann"]}
    assert await found(api, owner=own) == [session_id]
    move = await bob.http.put(f"/api/v1/sessions/{session_id}/project", json={"project_id": "q"})
    assert move.status_code == 404
    assert (await only(api))["project_id"] == "p"


async def test_a_finished_session_has_the_first_reason(api: Api) -> None:
    session_id = await session(api)
    finish = f"sessions/{session_id}/finish"
    await api.ok(finish, reason={"type": "errored"}, detail="out of luck")
    await api.ok(finish, reason={"type": "success"}, detail=None)
    status = {
        "type": "client_finished",
        "reason": {"type": "errored"},
        "detail": "out of luck",
    }
    assert (await only(api))["status"] == status
    assert (await api.get(f"sessions/{session_id}")).json()["status"] == status
    finished = {"type": "client_finished"}
    assert await found(api, statuses=[finished]) == [session_id]
    assert await found(api, statuses=[finished | {"reasons": ["success"]}]) == []
    assert await found(api, statuses=[finished | {"reasons": ["success", "errored"]}]) == [
        session_id
    ]
    assert await found(api, statuses=[{"type": "active"}, {"type": "cancelled"}]) == []


async def test_a_silent_session_is_failed_by_what_failed_last(api: Api) -> None:
    quiet, failed, recovered = [await session(api) for _ in range(3)]
    model = await api.model(failed)
    bad = await api.forward_backward(model, 1, loss_fn="nonsense")
    await api.failure(bad)
    sampler = await api.sampler(recovered)
    await api.failure(await api.sample(sampler, sampling_params={"max_tokens": -1}))
    await api.result(await api.sample(sampler))
    active = [{"type": "active"}]
    assert await found(api, statuses=active) == [recovered, failed, quiet]
    for session_id in (quiet, failed, recovered):
        await silence(api, session_id)
    assert await found(api, statuses=active) == []
    summary = await only(api, statuses=[{"type": "failed"}])
    assert summary["session_id"] == failed
    assert summary["status"]["category"] == "user"
    assert summary["status"]["reason"] == {
        "type": "request",
        "request_id": bad["request_id"],
        "request_type": "ForwardBackward",
    }
    assert "nonsense" in summary["status"]["message"]
    assert "status" not in await only(api, session_id=quiet)


async def test_runs_are_listed_by_project(api: Api) -> None:
    inside = await session(api, project_id="p")
    outside = await session(api)
    kept, moved = await api.model(inside), await api.model(outside)

    async def runs(**query: str) -> list[str]:
        body = (await api.get("training_runs", **query)).json()
        assert body["cursor"]["total_count"] == len(body["training_runs"])
        return [run["training_run_id"] for run in body["training_runs"]]

    assert await runs() == [moved, kept]
    assert await runs(project_id="p") == [kept]
    assert await runs(project_id="default") == [moved]
    assert await runs(project_id="unknown") == []
    move = await api.http.put(f"/api/v1/sessions/{outside}/project", json={"project_id": "p"})
    assert move.status_code == 204
    assert await runs(project_id="p") == [moved, kept]
    assert (await api.get(f"sessions/{outside}")).json()["project_id"] == "p"
    bob = api.as_user("bob")
    assert (await bob.get("training_runs", project_id="p")).json()["training_runs"] == []


@pytest.mark.parametrize("project_id", ["x" * 129, "a\nb"])
async def test_a_faulty_project_is_refused(api: Api, project_id: str) -> None:
    path = f"/api/v1/sessions/{await session(api)}/project"
    assert (await api.http.put(path, json={"project_id": project_id})).status_code == 422
    assert (await api.post("create_session", tags=[], project_id=project_id)).status_code == 422
    assert (await api.http.put(path, json={})).status_code == 400


@pytest.mark.parametrize(
    "query",
    [
        {"limit": 0},
        {"limit": 201},
        {"statuses": []},
        {"statuses": [{"type": "odd"}]},
        {"cursor": {"last_created_at": "2026-01-01T00:00:00", "last_session_id": "x"}},
        {"owner": {"type": "nobody"}},
        {"user_metadata": {"a": 1}},
    ],
)
async def test_a_faulty_search_is_refused(api: Api, query: dict[str, Any]) -> None:
    assert (await api.post("sessions/search", **query)).status_code == 422


@pytest.mark.filterwarnings(f"ignore::{ExperimentalWarning.__module__}.ExperimentalWarning")
def test_the_sdk_searches_and_moves_sessions(tmp_path: Path) -> None:
    with thread_server(tmp_path) as (base_url, key):
        service = tinker.ServiceClient(
            base_url=base_url, api_key=key, project_id="p", user_metadata={"k": "v"}
        )
        run = service.create_lora_training_client("fake/tiny", rank=4).result()
        service.close("interrupted").result()
        rest = tinker.RestClient(base_url=base_url, api_key=key)
        request = types.SessionSearchRequest(project_ids=["p"], user_metadata={"k": "v"})
        page = rest.search_sessions(request).result()
        [summary] = page.sessions
        assert page.next_cursor is None
        assert isinstance(summary.status, types.ClientSessionFinished)
        assert summary.status.reason.type == "interrupted"
        assert summary.created_at.tzinfo is UTC or summary.created_at.utcoffset() is not None
        rest.assign_session_project(summary.session_id, "q").result()
        runs = rest.list_training_runs(project_id="q").result()
        assert [r.training_run_id for r in runs.training_runs] == [run.model_id]
        assert rest.list_training_runs(project_id="p").result().training_runs == []
        contents = rest.get_session(summary.session_id).result()
        assert contents.training_run_ids == [run.model_id]
        assert contents.user_metadata == {"k": "v"}


async def test_sessions_of_earlier_versions_are_found(tmp_path: Path) -> None:
    """Their details have no project and no detail of their end."""
    async with serving(tmp_path) as api:
        await api.services.database.write(
            "INSERT INTO sessions VALUES ('old', 'ann', 1.5, 1.5, 2.5, 'success', '{\"tags\": []}')"
        )
        summary = await only(api)
    assert (summary["project_id"], summary["status"]["type"]) == ("default", "client_finished")
