"""The timeline of a session, behind a link that needs no key."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from click.testing import CliRunner
from tinker import types
from tinker.cli.__main__ import main_cli as cli

from tests.api.harness import Api, serving
from tests.api.thread_server import DATA, PROMPT, thread_server
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.config import Config


def stranger(api: Api) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=api.app), base_url="http://server")


async def trace_of(api: Api, session_id: str) -> list[dict[str, Any]]:
    reply = (await api.get(f"sessions/{session_id}/trace_export")).json()
    assert reply["status"] == "ready"
    async with stranger(api) as client:
        response = await client.get(reply["url"])
    assert response.status_code == 200, response.text
    return response.json()["traceEvents"]


def slices(events: list[dict[str, Any]], phase: str = "running") -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["cat"] == phase]


async def test_every_operation_has_its_time_and_its_place(tmp_path: Path) -> None:
    backend = FakeBackend(Config(data_dir=tmp_path), latency_s=0.1)
    async with serving(tmp_path, backend=backend) as api:
        session_id = await api.session()
        model = await api.model(session_id)
        for seq_id in (1, 2):
            await api.optim_step(model, seq_id)
        sampler = await api.sampler(session_id)
        accepted = [await api.sample(sampler, seq_id=i) for i in range(3)]
        for sample in accepted:
            await api.result(sample)
        await api.result(await api.optim_step(model, 3))
        await api.model()  # of another session
        events = await trace_of(api, session_id)
    running = slices(events)
    kinds = sorted(event["name"] for event in running)
    assert kinds == ["CreateModel"] + ["OptimStep"] * 3 + ["Sample"] * 3
    assert all(event["dur"] >= 0.09e6 for event in running)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == sorted([model, sampler])
    steps = [event for event in running if event["name"] == "OptimStep"]
    assert [event["args"]["seq_id"] for event in steps] == [1, 2, 3]
    assert len({event["tid"] for event in steps}) == 1, "a model's operations follow each other"
    ends = [event["ts"] + event["dur"] for event in steps]
    assert all(e["ts"] >= end for e, end in zip(steps[1:], ends, strict=False))
    waited = [e for e in slices(events, "waiting") if e["args"]["seq_id"] == 2]
    assert max(event["dur"] for event in waited) > 0.05e6, "the second step waited for the first"
    samples = [event for event in running if event["name"] == "Sample"]
    assert len({event["tid"] for event in samples}) == 3, "samples at once have a row each"
    assert {e["args"]["request_id"] for e in samples} == {a["request_id"] for a in accepted}


async def test_a_pending_operation_lasts_until_now(tmp_path: Path) -> None:
    backend = FakeBackend(Config(data_dir=tmp_path), latency_s=2.0)
    async with serving(tmp_path, backend=backend) as api:
        session_id = await api.session()
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": "fake/tiny"}
        await api.ok("create_model", **body)
        events = await trace_of(api, session_id)
    assert [event["args"]["status"] for event in slices(events, "waiting")] == ["pending"]


async def test_a_changed_link_and_a_foreign_session_are_refused(api: Api) -> None:
    mine, other = await api.session(), await api.session()
    assert (await api.as_user("bob").get(f"sessions/{mine}/trace_export")).status_code == 404
    url = (await api.get(f"sessions/{mine}/trace_export")).json()["url"]
    async with stranger(api) as client:
        for faulty in (
            url.replace(mine, other),
            url.replace("reader=ann", "reader=bob"),
            url.replace("expires=", "expires=9"),
            url[:-1] + ("0" if url[-1] != "0" else "1"),
            url.partition("?")[0],
        ):
            assert (await client.get(faulty)).status_code == 404
        assert (await client.get(url)).status_code == 200


async def test_a_link_ends_after_an_hour(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    session_id = await api.session()
    url = (await api.get(f"sessions/{session_id}/trace_export")).json()["url"]
    import time

    now = time.time()
    monkeypatch.setattr("tinkercloud.services.accounts.signed_links.time.time", lambda: now + 3601)
    async with stranger(api) as client:
        assert (await client.get(url)).status_code == 404


def test_the_command_line_exports_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with thread_server(tmp_path / "data") as (base_url, key):
        monkeypatch.setenv("TINKER_BASE_URL", base_url)
        monkeypatch.setenv("TINKER_API_KEY", key)
        service = tinker.ServiceClient()
        training = service.create_lora_training_client("fake/tiny", rank=4).result()
        training.forward_backward(DATA, "cross_entropy").result()
        sampler = training.save_weights_and_get_sampling_client().result()
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2)).result()
        session_id = training.model_id.partition(":")[0]
        service.close("success").result()
        target = tmp_path / "trace.pftrace"
        arguments = ["session", "export-trace", session_id]
        result = CliRunner().invoke(cli, [*arguments, "-o", str(target)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        names = {event["name"] for event in json.loads(target.read_bytes())["traceEvents"]}
        assert {"CreateModel", "ForwardBackward", "SaveWeightsForSampler", "Sample"} <= names
        url = CliRunner().invoke(cli, [*arguments, "--url-only"]).stdout.strip()
        assert urllib.request.urlopen(url.splitlines()[-1], timeout=10).status == 200
