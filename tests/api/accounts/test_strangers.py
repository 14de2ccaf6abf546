"""What somebody is told who names what is another user's: on every route that there is.

`ROUTES` has a line for each; a new route fails here until it has one.
"""

from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from tests.api.accounts.test_authentication import CONSOLE_LINKS, routes
from tests.api.checkpoints.calls import saved
from tests.api.harness import PROTOBUF, Api, body_of
from tests.api.models.test_custom_losses import body as loss_body

V, RUN = "/api/v1", "/api/v1/training_runs/{run}"
CHECKPOINT = RUN + "/checkpoints/{segment}/ck1"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "model": "{path}"}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
SAMPLE = {"prompt": PROMPT, "sampling_params": {"max_tokens": 1}}
COUNT = {"messages": CHAT["messages"], "model": "{path}"}
NEW = {"session_id": "{session}", "sampling_session_seq_id": 9, "base_model": "fake/tiny"}
CAPTURE = V + "/captures/{capture}"

NOT_FOUND: dict[tuple[str, str], list[tuple[str, Any]]] = {
    ("POST", V + "/asample"): [
        (V + "/asample", SAMPLE | {"sampling_session_id": "{sampler}"}),
        (V + "/asample", SAMPLE | {"model_path": "{path}"}),
    ],
    ("POST", V + "/sample"): [(V + "/sample", SAMPLE | {"sampling_session_id": "{sampler}"})],
    ("POST", V + "/create_sampling_session"): [
        (V + "/create_sampling_session", NEW),
        (V + "/create_sampling_session", NEW | {"session_id": "{own}", "model_path": "{path}"}),
    ],
    ("POST", V + "/create_sampling_client"): [
        (V + "/create_sampling_client", {"model_path": "{path}"}),
        (V + "/create_sampling_client", NEW),
    ],
    ("POST", V + "/join_sampling_session"): [
        (V + "/join_sampling_session", {"sampling_session_id": "{sampler}"})
    ],
    ("GET", V + "/samplers/{sampler_id}"): [(V + "/samplers/{sampler}", None)],
    ("POST", V + "/retrieve_future"): [
        (V + "/retrieve_future", {"request_id": "{training}"}),
        (V + "/retrieve_future", {"request_id": "{sample}"}),
    ],
    ("POST", V + "/retrieve_futures"): [
        (
            V + "/retrieve_futures",
            {
                "prev_cursor": 0,
                "retrieved_request_ids": [],
                "target": {
                    "type": "sampling_session",
                    "sampling_session_id": "{sampler}",
                    "cloned_sampler_id": 0,
                },
            },
        )
    ],
    ("POST", V + "/cancel_future"): [
        (V + "/cancel_future", {"request_id": "{training}"}),
        (V + "/cancel_future", {"request_id": "{sample}"}),
    ],
    ("GET", V + "/retrieve_future/{request_id}"): [(V + "/retrieve_future/{training}", None)],
    ("POST", V + "/retrieve_future/{request_id}"): [(V + "/retrieve_future/{sample}", {})],
    ("POST", V + "/create_custom_loss"): [(V + "/create_custom_loss", loss_body("{session}"))],
    ("POST", V + "/optim_step"): [
        (V + "/optim_step", {"model_id": "{run}", "seq_id": 9, "adam_params": {}})
    ],
    ("POST", V + "/session_heartbeat"): [(V + "/session_heartbeat", {"session_id": "{session}"})],
    ("POST", V + "/sessions/{session_id}/finish"): [
        (V + "/sessions/{session}/finish", {"reason": {"type": "success"}})
    ],
    ("PUT", V + "/sessions/{session_id}/project"): [
        (V + "/sessions/{session}/project", {"project_id": "p"})
    ],
    ("GET", V + "/sessions/{session_id}"): [(V + "/sessions/{session}", None)],
    ("GET", V + "/sessions/{session_id}/trace_export"): [
        (V + "/sessions/{session}/trace_export", None)
    ],
    ("GET", V + "/signed/traces/{session_id}"): [
        (V + "/signed/traces/{session}?reader=ann&expires=9999999999&signature=00", None)
    ],
    ("GET", V + "/signed/{run_id}/{segment}/{name}/{generation}/{file}"): [
        (
            V + "/signed/{run}/weights/ck1/{generation}/archive.tar"
            "?reader=ann&expires=9999999999&signature=00",
            None,
        )
    ],
    ("POST", V + "/create_model"): [
        (
            V + "/create_model",
            {"session_id": "{session}", "model_seq_id": 9, "base_model": "fake/tiny"},
        )
    ],
    ("POST", V + "/load_weights"): [
        (
            V + "/load_weights",
            {"session_id": "{own}", "model_seq_id": 9, "path": "{path}", "optimizer": False},
        ),
        (
            V + "/load_weights",
            {"model_id": "{run}", "seq_id": 9, "path": "{path}", "optimizer": False},
        ),
    ],
    **{
        ("POST", f"{V}/{call}"): [(f"{V}/{call}", {"model_id": "{run}", "seq_id": 9, "path": "x"})]
        for call in (
            "get_info",
            "delete_model",
            "unload_model",
            "save_weights",
            "save_weights_for_sampler",
            "save_weights_external",
        )
    },
    ("POST", V + "/weights_info"): [(V + "/weights_info", {"tinker_path": "{path}"})],
    ("POST", V + "/copy_weights"): [
        (V + "/copy_weights", {"source_path": "{path}", "destination_project_id": "p"}),
        (
            V + "/copy_weights",
            {"source_path": "{path}", "session_id": "{session}", "model_seq_id": 1},
        ),
    ],
    ("GET", V + "/training_runs/{run_id}"): [(RUN, None), (RUN + "?access_scope=accessible", None)],
    ("GET", V + "/training_runs/{run_id}/checkpoints"): [(RUN + "/checkpoints", None)],
    ("GET", V + "/training_runs/{run_id}/metrics"): [(RUN + "/metrics", None)],
    ("POST", V + "/training_runs/{run_id}/metrics"): [
        (RUN + "/metrics", {"points": [{"step": 1, "metrics": {"reward": 1.0}}]})
    ],
    **{
        (method, V + "/training_runs/{run_id}/checkpoints/{segment}/{name}" + verb): [
            (CHECKPOINT + verb, body)
        ]
        for method, verb, body in (
            ("DELETE", "", None),
            ("POST", "/publish", None),
            ("DELETE", "/publish", None),
            ("PUT", "/ttl", {"ttl_seconds": 4000}),
            ("GET", "/external_weights_urls", None),
            ("GET", "/archive", None),
        )
    },
    ("GET", V + "/captures/{capture_id}"): [(CAPTURE, None)],
    ("PATCH", V + "/captures/{capture_id}"): [(CAPTURE, {"model": "fake/tiny"})],
    ("DELETE", V + "/captures/{capture_id}"): [(CAPTURE, None)],
    ("POST", V + "/captures/{capture_id}/close"): [(CAPTURE + "/close", {})],
    ("POST", V + "/captures/{capture_id}/rewards"): [(CAPTURE + "/rewards", {"value": 1.0})],
    ("GET", V + "/captures/{capture_id}/trajectories"): [(CAPTURE + "/trajectories", None)],
    ("GET", V + "/captures/{capture_id}/datums"): [(CAPTURE + "/datums", None)],
    ("POST", "/oai/api/v1/chat/completions"): [("/oai/api/v1/chat/completions", CHAT)],
    ("POST", "/oai/api/v1/completions"): [
        ("/oai/api/v1/completions", {"prompt": "x", "max_tokens": 1, "model": "{path}"})
    ],
    ("POST", "/oai/api/v1/verify"): [
        ("/oai/api/v1/verify", {"prompt": "x", "drafted": [1], "model": "{path}"})
    ],
    ("POST", "/oai/api/v1/train_draft"): [("/oai/api/v1/train_draft", {"model": "{path}"})],
    ("GET", "/oai/api/v1/models/{name:path}"): [("/oai/api/v1/models/{path}", None)],
    ("POST", "/anthropic/api/v1/messages"): [("/anthropic/api/v1/messages", CHAT)],
    ("POST", "/anthropic/api/v1/messages/count_tokens"): [
        ("/anthropic/api/v1/messages/count_tokens", COUNT)
    ],
    ("GET", "/anthropic/api/v1/models/{name:path}"): [("/anthropic/api/v1/models/{path}", None)],
    ("GET", "/console/runs/{run_id}/events"): [("/console/runs/{run}/events", None)],
    ("POST", "/console/chat"): [("/console/chat", CHAT)],
}
GONE = 410
"""What a poll for an unknown sample is told, whosever it is: its client then samples again."""
LISTS = {
    V + "/training_runs": "training_runs",
    V + "/checkpoints": "checkpoints",
    V + "/sessions": "sessions",
    V + "/captures": "captures",
    V + "/audit": "entries",
    V + "/billing/usage/checkpoints/current": "data",
    V + "/billing/usage/events": "data",
    "/console/samples": "samples",
    "/oai/api/v1/models": None,
    "/anthropic/api/v1/models": None,
}
"""By GET: what is listed, and where in the answer. None: it is searched for ids."""
NAMES_NOTHING = {
    ("POST", V + "/auth/token"),
    ("GET", V + "/auth/apikey/me"),
    ("DELETE", V + "/auth/apikey/me"),
    ("POST", V + "/client/config"),
    ("POST", V + "/client/dynamic_config"),
    ("POST", V + "/create_session"),
    ("POST", V + "/telemetry"),
    ("POST", V + "/captures"),
    ("GET", V + "/get_server_capabilities"),
    ("GET", V + "/healthz"),
    ("GET", "/health"),
    ("GET", "/healthz"),
    ("GET", "/openapi.json"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
    ("GET", "/console"),
    ("GET", "/console/events"),
    ("GET", "/console/session"),
    ("POST", "/console/session"),
    ("DELETE", "/console/session"),
    ("GET", "/console/static/{path:path}"),
    *CONSOLE_LINKS,
    ("GET", "/oai/api/v1/{path:path}"),
    ("POST", "/oai/api/v1/{path:path}"),
    ("GET", "/anthropic/api/v1/{path:path}"),
    ("POST", "/anthropic/api/v1/{path:path}"),
}
ELSEWHERE = {
    ("POST", V + "/forward_backward"),
    ("POST", V + "/forward"),
    ("POST", V + "/cleanup_futures"),
    ("POST", V + "/sessions/search"),
}
"""Answered with 200 whatever they name: each has a test of its own below."""


def covered(method: str, path: str) -> bool:
    if path.startswith("/captures/{capture_id}"):
        return True
    return (method, path) in NOT_FOUND.keys() | NAMES_NOTHING | ELSEWHERE or (
        method == "GET" and path in LISTS
    )


async def owned(api: Api, stranger: Api) -> dict[str, str]:
    """The names of everything that ann has, and `own`: a session of the stranger."""
    run, path = await saved(api)
    session = run.partition(":")[0]
    sampler = await api.sampler(session)
    sample = await api.sample(sampler)
    await api.result(sample)
    training = await api.forward_backward(run, 4)
    await api.result(training)
    capture = await api.ok("captures", model="fake/tiny")
    [row] = await api.services.database.all("SELECT directory FROM checkpoints")
    return {
        "run": run, "path": path, "session": session, "sampler": sampler, "segment": "weights",
        "sample": sample["request_id"], "training": training["request_id"],
        "capture": capture["capture_id"], "generation": row["directory"].rpartition("/")[2],
        "own": await stranger.session(),
    }  # fmt: skip


def absent(names: Mapping[str, str]) -> dict[str, str]:
    """The same forms, and there is nothing of these names."""
    session = "00000000-0000-4000-8000-000000000000"
    run = f"{session}:train:0"
    return {
        **names, "session": session, "run": run, "path": f"tinker://{run}/weights/ck1",
        "sampler": f"{session}:sample:0", "sample": "sample-" + "0" * 32,
        "training": "train-" + "0" * 32, "capture": "0" * len(names["capture"]),
        "generation": "0" * 12,
    }  # fmt: skip


def filled(form: Any, names: Mapping[str, str]) -> Any:
    if isinstance(form, str):
        for name, value in names.items():
            form = form.replace(f"{{{name}}}", value)
        return form
    if isinstance(form, dict):
        return {key: filled(value, names) for key, value in form.items()}
    return [filled(value, names) for value in form] if isinstance(form, list) else form


def told(answer: httpx.Response, names: Mapping[str, str]) -> tuple[int, str]:
    """The status and the text, without the names that were asked for."""
    text = answer.text
    for name in ("path", "sampler", "run", "session", "sample", "training", "capture"):
        text = text.replace(names[name], f"<{name}>")
    return answer.status_code, text


async def ask(api: Api, method: str, path: str, body: Any, names: Mapping[str, str]) -> Any:
    url = filled(path, names)
    return await api.http.request(method, url, json=filled(body, names))


async def test_every_route_says_404_of_what_is_anothers_as_of_what_is_not_there(api: Api) -> None:
    missing = [pair for pair in routes(api) if pair[0] != "HEAD" and not covered(*pair)]
    assert missing == [], "give each a line in this file"
    bob = api.as_user("bob")
    names = await owned(api, bob)
    reads: list[Any] = []
    plain = api.services.database.one

    async def counted(sql: str, *arguments: object) -> Any:
        reads.append(sql)
        return await plain(sql, *arguments)

    object.__setattr__(api.services.database, "one", counted)
    for (method, route), calls in NOT_FOUND.items():
        for path, body in calls:
            reads.clear()
            foreign = told(await ask(bob, method, path, body, names), names)
            num_reads = len(reads)
            nothing = absent(names)
            reads.clear()
            unknown = told(await ask(bob, method, path, body, nothing), nothing)
            assert foreign == unknown, (method, route)
            assert num_reads == len(reads), (method, route)  # nor by the time that it takes
            polls_sample = "{sample}" in str((path, body))
            assert foreign[0] == (GONE if polls_sample else 404), (method, route, foreign)
    # nothing of it has changed anything
    assert (await api.get(f"sessions/{names['session']}")).json()["status"] == {"type": "active"}
    assert (await api.post("weights_info", tinker_path=names["path"])).status_code == 200
    assert await api.loss(names["run"], 5) > 0


@pytest.mark.parametrize("labels", ["", "/groups/g", "/episodes/e", "/groups/g/episodes/e"])
async def test_anothers_capture_session_takes_no_turns(api: Api, labels: str) -> None:
    capture = (await api.ok("captures", model="fake/tiny"))["capture_id"]
    bob, calls = api.as_user("bob"), 0
    for method, path in routes(api):
        if not path.startswith("/captures/{capture_id}" + labels.replace("/g/", "/{group}/")):
            continue
        bodies: dict[str, Any] = {"messages": CHAT, "completions": CHAT, "count_tokens": COUNT}
        url = path.replace("{capture_id}", capture).replace("{name:path}", "x")
        url = url.replace("{group}", "g").replace("{episode}", "e")
        last = path.rpartition("/")[2]
        answer = await bob.http.request(method, url, json=filled(bodies.get(last), {"path": "x"}))
        assert answer.status_code == 404, (method, url, answer.text)
        calls += 1
    assert calls or labels


async def test_lists_show_nothing_of_anothers(api: Api) -> None:
    bob = api.as_user("bob")
    names = await owned(api, bob)
    window = {"starting_on": "2020-01-01T00:00:00Z", "ending_before": "2020-01-02T00:00:00Z"}
    for path, field in LISTS.items():
        answer = await bob.http.get(path, params=window | {"access_scope": "accessible"})
        assert answer.status_code == 200, (path, answer.text)
        assert not any(names[name] in answer.text for name in ("run", "session", "capture")), path
        listed = [] if field is None else answer.json()[field]
        own = [names["own"]] if path == V + "/sessions" else []
        assert path == V + "/audit" or listed == own, (path, listed)


async def test_training_anothers_model_fails_as_that_of_none(api: Api) -> None:
    bob = api.as_user("bob")
    names = await owned(api, bob)
    nothing = absent(names)
    texts = [
        (await bob.failure(await bob.forward_backward(of["run"], 9))).replace(of["run"], "<run>")
        for of in (names, nothing)
    ]
    assert texts[0] == texts[1]
    assert "does not exist" in texts[0]
    body = body_of(names["run"], 10, forward_only=True)
    plain = await bob.http.post(V + "/forward", content=body, headers=PROTOBUF)
    assert plain.status_code == 400


async def test_anothers_results_are_not_forgotten_and_sessions_not_found(api: Api) -> None:
    bob = api.as_user("bob")
    names = await owned(api, bob)
    asked = {"request_ids": [names["training"]], "model_id": names["run"]}
    assert (await bob.ok("cleanup_futures", **asked))["num_deleted"] == 0
    for owner in ({"type": "accessible"}, {"type": "user", "owner_urns": ["ann"]}):
        found = await bob.ok("sessions/search", session_id=names["session"], owner=owner)
        assert found["sessions"] == []
    assert (await api.retrieve(names["training"])).status_code == 200
