"""The OpenAPI document, and requests made of it: none is a 500, none hangs, memory stays."""

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import Phase, given
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from benchmarks.peers.training_common import memory_bytes
from tests import serving
from tests.api.harness import Api
from tests.fuzzing import fuzzing

FEW, MANY = 2, 200  # requests of each operation and kind
LONGEST_S = 5.0
MOST_BYTES = 150 * 1024**2


async def document_of(api: Api) -> dict[str, Any]:
    response = await api.http.get("/openapi.json")
    assert response.status_code == 200
    return response.json()


async def test_the_document_has_every_route_and_asks_for_a_key(api: Api) -> None:
    document = await document_of(api)
    routes = [r for r in api.app.routes if isinstance(r, APIRoute) and r.include_in_schema]
    for route in routes:
        operations = document["paths"][route.path_format]
        assert {method.lower() for method in route.methods} <= operations.keys()
        if route.body_field is not None:
            assert all("requestBody" in operations[m.lower()] for m in route.methods)
    assert {"forward_backward", "asample", "retrieve_future"} <= {
        path.removeprefix("/api/v1/") for path in document["paths"]
    }
    training = document["paths"]["/api/v1/forward_backward"]["post"]["requestBody"]["content"]
    assert training.keys() == {"application/json", "application/x-protobuf"}
    api.http.headers.pop("X-API-Key")
    assert (await api.http.get("/openapi.json")).status_code == 401


async def test_every_reference_of_the_document_leads_somewhere(api: Api) -> None:
    document = await document_of(api)
    references = set()

    def collect(node: Any) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                references.add(node["$ref"])
            for value in node.values():
                collect(value)
        elif isinstance(node, list):
            for value in node:
                collect(value)

    collect(document)
    names = {reference.removeprefix("#/components/schemas/") for reference in references}
    assert names <= document["components"]["schemas"].keys()
    assert "SampleRequest" in names


class Fuzzer:
    """Sends what schemathesis makes, half of it with ids that are there."""

    def __init__(self, server: serving.Server):
        self.server = server
        self.http = server.http(timeout_s=4 * LONGEST_S)
        self.document = self.http.get("/openapi.json").json()
        training = self.document["paths"]["/api/v1/forward_backward"]["post"]["requestBody"]
        del training["content"]["application/x-protobuf"]  # schemathesis has no bytes of it
        schemas = self.document["components"]["schemas"]
        for chunk, name in (("DmelChunk", "dmel"), ("ImageChunk", "data")):
            del schemas[chunk]["properties"][name]["format"]  # nor of those, which lie in JSON
        self._numbers = itertools.count()
        self.statuses: dict[int, int] = {}
        self._known: dict[str, Any] = {}

    def renew(self) -> None:
        """Ids of a session, sampler and model of its own; the last one may have been finished."""
        session_id = self._made("create_session", {"tags": []})["session_id"]
        about = {"session_id": session_id, "base_model": "fake/tiny"}
        sampler = self._made("create_sampling_session", {**about, "sampling_session_seq_id": 0})
        model = self._made("create_model", {**about, "model_seq_id": 0, "lora_config": {"rank": 4}})
        self._known = {
            "session_id": session_id,
            "sampling_session_id": sampler["sampling_session_id"],
            "sampler_id": sampler["sampling_session_id"],
            "model_id": model["model_id"],
            "run_id": model["model_id"],
            "request_id": model["request_id"],
            "base_model": "fake/tiny",
            "model": "fake/tiny",
        }

    def _made(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self.http.post(f"/api/v1/{path}", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def send(self, case: schemathesis.Case) -> None:
        if next(self._numbers) % 2:
            self._fill(case.path_parameters)
            self._fill(case.body)
        request = case.as_transport_kwargs(base_url=self.server.base_url)
        try:
            wire = httpx.Request(
                request["method"],
                request["url"],
                params=request.get("params") or None,
                headers={**request["headers"], "X-API-Key": self.server.api_key},
                cookies=request.get("cookies"),
                content=self._content(request),
            )
        except (ValueError, TypeError, UnicodeError):
            return  # no client can send it
        begun = time.perf_counter()
        response = self.http.send(wire)
        waited_s = time.perf_counter() - begun
        where = f"{wire.method} {wire.url} {wire.content[:500]!r}: {response.text[:500]}"
        assert response.status_code < 500, where
        assert waited_s < LONGEST_S, where
        self.statuses[response.status_code] = self.statuses.get(response.status_code, 0) + 1

    @staticmethod
    def _content(request: dict[str, Any]) -> bytes | None:
        if "json" in request:
            return json.dumps(request["json"]).encode()
        data = request.get("data")
        return data if isinstance(data, bytes | None) else str(data).encode()

    def _fill(self, node: Any) -> None:
        """Ids that are there, and sizes that the fake backend samples in no time."""
        if isinstance(node, list):
            for value in node:
                self._fill(value)
        if not isinstance(node, dict):
            return
        for name, value in node.items():
            if name in self._known:
                node[name] = self._known[name]
            elif name in ("max_tokens", "num_samples", "n") and isinstance(value, int):
                node[name] = min(value, 3)
            else:
                self._fill(value)


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzer]:
    folder: Path = tmp_path_factory.mktemp("fuzzed") / "data"
    with serving.start_server("--backend", "fake", "--hold-s", "0.2", data_dir=folder) as server:
        yield Fuzzer(server)


@pytest.mark.parametrize("num_examples", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_no_request_of_the_document_is_a_defect(
    fuzzer: Fuzzer, mode: GenerationMode, num_examples: int
) -> None:
    schema = schemathesis.openapi.from_dict(fuzzer.document)
    before, num_checked = resident_bytes(fuzzer.server), 0
    for operation in (result.ok() for result in schema.get_all_operations()):
        fuzzer.renew()

        @fuzzing(num_examples, repeats=num_examples == FEW, phases=[Phase.generate])
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: schemathesis.Case) -> None:
            fuzzer.send(case)

        try:
            check()
        except Unsatisfiable:  # nothing is wrong for what takes nothing
            assert mode is GenerationMode.NEGATIVE
        else:
            num_checked += 1
    assert num_checked > 50
    assert {200, 404, 422} <= fuzzer.statuses.keys()
    assert "Traceback" not in fuzzer.server.output()
    assert resident_bytes(fuzzer.server) - before < MOST_BYTES


def resident_bytes(server: serving.Server) -> int:
    assert server.process is not None
    return memory_bytes("VmRSS", [server.process.pid])
