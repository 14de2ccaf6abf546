"""What keys of each role may do."""

from datetime import UTC, datetime, timedelta

from tests.api.accounts.test_authentication import routes
from tests.api.checkpoints.calls import saved, url
from tests.api.harness import Api

READS = ("retrieve_future", "retrieve_futures", "weights_info", "get_info", "sessions/search",
         "auth/token", "client/config", "client/dynamic_config", "telemetry")  # fmt: skip


async def test_a_read_only_key_reads_what_its_user_has(api: Api) -> None:
    run, path = await saved(api)
    accepted = await api.forward_backward(run, 4)
    reader = api.as_user("reader")
    assert (await reader.get("training_runs")).json()["cursor"]["total_count"] == 1
    assert (await reader.get(f"training_runs/{run}")).json()["model_owner"] == "ann"
    assert (await reader.ok("weights_info", tinker_path=path))["lora_rank"] == 8
    assert (await reader.result(accepted)).metrics["loss:sum"] > 0
    assert (await reader.http.get(url(path, "/archive"))).status_code == 302
    assert (await reader.ok("sessions/search"))["sessions"] != []
    assert (await reader.ok("auth/token"))["jwt"]


async def test_a_read_only_key_changes_nothing_by_any_route(api: Api) -> None:
    reader = api.as_user("reader")
    open_routes = {f"/api/v1/{path}" for path in READS}
    open_routes |= {"/anthropic/api/v1/messages/count_tokens", "/api/v1/auth/apikey/me"}
    open_routes.add("/console/session")
    for method, path in routes(api):
        if method in ("GET", "HEAD") or path in open_routes or path.endswith("{path:path}"):
            continue
        answer = await reader.http.request(method, path, json={})
        # 422: the body, which is looked at first, was no request
        assert answer.status_code in (400, 403, 404, 422), (method, path, answer.text)
    run, path = await saved(api)
    for call, body in {
        "create_session": {"tags": []},
        "optim_step": {"model_id": run, "seq_id": 4, "adam_params": {}},
        "save_weights": {"model_id": run, "seq_id": 4, "path": "x"},
        "delete_model": {"model_id": run},
        "cancel_future": {"request_id": "sample-0"},
        "create_sampling_client": {"base_model": "fake/tiny"},
    }.items():
        answer = await reader.post(call, **body)
        assert answer.status_code == 403, (call, answer.text)
        assert "read-only" in answer.json()["detail"]
        assert "tinkercloud keys add ann" in answer.json()["detail"]
    assert (await reader.http.delete(url(path))).status_code == 403
    assert (await reader.http.post(url(path, "/publish"))).status_code == 403
    assert (await api.post("weights_info", tinker_path=path)).status_code == 200
    assert await api.loss(run, 4) > 0


async def test_a_token_has_the_role_of_its_key(api: Api) -> None:
    token = (await api.as_user("reader").ok("auth/token"))["jwt"]
    answer = await api.http.post(
        "/api/v1/create_session", json={"tags": []}, headers={"X-API-Key": token}
    )
    assert answer.status_code == 403


async def test_an_administrator_sees_what_is_anybodys(api: Api) -> None:
    run, path = await saved(api)
    session, eve = run.partition(":")[0], api.as_user("eve")
    listed = (await eve.get("training_runs", access_scope="accessible")).json()
    assert [r["training_run_id"] for r in listed["training_runs"]] == [run]
    assert listed["training_runs"][0]["last_checkpoint"]["tinker_path"] == path
    assert (await eve.get("training_runs")).json()["training_runs"] == []
    assert (await eve.get(f"training_runs/{run}/checkpoints")).json()["checkpoints"] != []
    assert (await eve.get(f"sessions/{session}")).json()["training_run_ids"] == [run]
    assert (await eve.get(f"sessions/{session}/trace_export")).status_code == 200
    assert (await eve.ok("sessions/search"))["sessions"] == []
    for owner in ({"type": "accessible"}, {"type": "user", "owner_urns": ["ann"]}):
        [found] = (await eve.ok("sessions/search", owner=owner))["sessions"]
        assert (found["session_id"], found["checkpoints_count"]) == (session, 1)
    begin = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = {"starting_on": begin.isoformat(),
              "ending_before": (begin + timedelta(hours=2)).isoformat()}  # fmt: skip
    rows = (await eve.get("billing/usage/events", **window)).json()["data"]
    assert {row["user_name"] for row in rows} == {"ann"}
    stored = (await eve.get("billing/usage/checkpoints/current")).json()["data"]
    assert [(item["user_name"], item["checkpoint_count"]) for item in stored] == [("ann", 1)]
    entries = (await eve.get("audit", event_type="checkpoints")).json()["entries"]
    assert [(e["event"], e["event_details"]["user"]) for e in entries] == [
        ("checkpoint_saved", "ann")
    ]


async def test_an_administrator_ends_and_deletes_and_the_owner_can_see_it(api: Api) -> None:
    run, path = await saved(api)
    session, eve = run.partition(":")[0], api.as_user("eve")
    assert (await eve.http.delete(url(path))).status_code == 204
    assert (await api.post("weights_info", tinker_path=path)).status_code == 404
    await eve.ok(f"sessions/{session}/finish", reason={"type": "interrupted"})
    assert (await api.post("session_heartbeat", session_id=session)).status_code == 410
    other = await api.model()
    await eve.ok("delete_model", model_id=other)
    assert (await api.post("get_info", model_id=other)).status_code == 404
    entries = (await api.get("audit", event_type="organizations")).json()["entries"]
    asked = [e["event_details"] for e in entries if e["event"] == "admin_request"]
    assert [(d["actor"], d["call"].split("/")[3]) for d in asked] == [
        ("eve", "training_runs"), ("eve", "sessions"), ("eve", "delete_model")
    ]  # fmt: skip


async def test_an_administrator_trains_and_samples_only_what_is_its_own(api: Api) -> None:
    run, path = await saved(api)
    eve = api.as_user("eve")
    assert (await eve.post("optim_step", model_id=run, seq_id=4, adam_params={})).status_code == 404
    assert (await eve.post("create_sampling_client", model_path=path)).status_code == 404
    await eve.train(await eve.model(), 1)
