"""Requests beside those with numbers: what scripts, consoles and operators ask meanwhile. Their
answers are not compared; a crash may come in each of them."""

import json
from dataclasses import dataclass
from urllib.parse import urlsplit

from tests.simulation.network import Answer


@dataclass(frozen=True, slots=True)
class Look:
    """path, body: with the names of `Named` in braces. method: what the wire has."""

    method: str
    path: str
    body: str = "{}"


@dataclass(frozen=True, slots=True)
class Named:
    """What a client knows; empty where it has none. run, name: of a checkpoint."""

    session: str
    model: str
    sampler: str
    run: str
    name: str
    request: str


LOSS = """{
    "session_id": "{session}", "custom_loss_seq_id": 0, "name": "total",
    "inputs": [{"name": "logprobs", "rank": 1}],
    "graph": {"format": 1, "nodes": [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "call_method", "name": "total", "target": "sum", "args": [{"ref": "logprobs"}]},
        {"op": "output", "name": "output", "target": "output",
         "args": [{"tuple": [{"ref": "total"}, {"dict": {}}]}]}
    ]}
}"""
FINISHED = '{"target": {"sampling_session_id": "{sampler}"}, "timeout": 1}'
CURVE = '{"points": [{"step": 1, "metrics": {"reward": 0.5}}]}'
COPY = '{"source_path": "tinker://{run}/weights/{name}", "destination_project_id": "p"}'
COPY_THERE = COPY.replace('"destination', '"session_id": "{session}", "destination')
YEARS = '{"ttl_seconds": 100000000}'
WINDOW = "starting_on=2023-11-14T00:00:00Z&ending_before=2023-11-20T00:00:00Z"
"""Around the beginning of time."""
LOOKS = (
    Look("get", "sessions?limit=20&offset=0"),
    Look("get", "sessions/{session}"),
    Look("get", "sessions/{session}/trace_export"),
    Look("get", "training_runs/{model}"),
    Look("get", "training_runs/{model}/checkpoints"),
    Look("get", "checkpoints?limit=20&offset=0"),
    Look("get", "samplers/{sampler}"),
    Look("get", "training_runs/{run}/checkpoints/weights/{name}/archive"),
    Look("get", f"billing/usage/events?{WINDOW}"),
    Look("get", "billing/usage/checkpoints/current"),
    Look("get", "audit"),
    Look("get", "healthz"),
    Look("get", "captures"),
    Look("post", "session_heartbeat", '{"session_id": "{session}"}'),
    Look("post", "weights_info", '{"tinker_path": "tinker://{run}/weights/{name}"}'),
    Look("post", "get_info", '{"model_id": "{model}"}'),
    Look("post", "join_sampling_session", '{"sampling_session_id": "{sampler}"}'),
    Look("post", "training_runs/{run}/checkpoints/weights/{name}/publish"),
    Look("delete", "training_runs/{run}/checkpoints/weights/{name}/publish"),
    Look("get", "training_runs?access_scope=accessible"),
    Look("get", "training_runs/{model}?access_scope=accessible"),
    Look("get", "training_runs/{run}/checkpoints/weights/{name}/external_weights_urls"),
    Look("get", "auth/apikey/me"),
    Look("get", "retrieve_future/{request}"),
    Look("put", "training_runs/{run}/checkpoints/weights/{name}/ttl", YEARS),
    Look("put", "sessions/{session}/project", '{"project_id": "p"}'),
    Look("post", "create_sampling_client", '{"base_model": "sim/small"}'),
    Look("post", "copy_weights", COPY),
    Look("post", "copy_weights", COPY_THERE),
    Look("post", "weights_info", '{"tinker_path": "{name}"}'),
    Look("post", "cleanup_futures", '{"request_ids": ["none-of-{session}"]}'),
    Look("post", "sessions/search"),
    Look("post", "create_custom_loss", LOSS),
    Look("post", "retrieve_futures", FINISHED),
    Look("post", "training_runs/{model}/metrics", CURVE),
    Look("get", "training_runs/{model}/metrics"),
)


LINKS = ("trace_export", "archive", "external_weights_urls")
"""Whose answers name what to read next."""


def links_of(path: str, answer: Answer) -> list[str]:
    """From the root of the server."""
    if not path.endswith(LINKS) or answer.status >= 400:
        return []
    body = json.loads(answer.body)
    urls = [body["url"]] if "url" in body else list(body["urls"].values())
    return [urlsplit(url)._replace(scheme="", netloc="").geturl() for url in urls]


def filled(look: Look, named: Named) -> tuple[str, bytes] | None:
    """(path, body); None where something that it names is not there."""
    path, body = look.path, look.body
    for name in Named.__slots__:
        value: str = getattr(named, name)
        if f"{{{name}}}" in path + body and not value:
            return None
        path, body = (text.replace(f"{{{name}}}", value) for text in (path, body))
    return path, body.encode()
