"""Requests beside those with numbers: what scripts, consoles and operators ask meanwhile. Their
answers are not compared; a crash may come in each of them."""

from dataclasses import dataclass


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


LOOKS = (
    Look("get", "sessions?limit=20&offset=0"),
    Look("get", "sessions/{session}"),
    Look("get", "sessions/{session}/trace_export"),
    Look("get", "training_runs/{model}"),
    Look("get", "training_runs/{model}/checkpoints"),
    Look("get", "checkpoints?limit=20&offset=0"),
    Look("get", "samplers/{sampler}"),
    Look("get", "training_runs/{run}/checkpoints/weights/{name}/archive"),
    Look("get", "billing/usage/events"),
    Look("get", "billing/usage/checkpoints/current"),
    Look("get", "audit"),
    Look("get", "healthz"),
    Look("get", "captures"),
    Look("post", "session_heartbeat", '{"session_id": "{session}"}'),
    Look("post", "sessions/search", '{"session_id": "{session}"}'),
    Look("post", "weights_info", '{"tinker_path": "tinker://{run}/weights/{name}"}'),
    Look("post", "get_info", '{"model_id": "{model}"}'),
    Look("post", "join_sampling_session", '{"sampling_session_id": "{sampler}"}'),
    Look("post", "retrieve_futures", '{"request_ids": ["{request}"]}'),
    Look("post", "training_runs/{run}/checkpoints/weights/{name}/publish"),
    Look("delete", "training_runs/{run}/checkpoints/weights/{name}/publish"),
    Look("post", "captures", '{"session_id": "{session}"}'),
)


def filled(look: Look, named: Named) -> tuple[str, bytes] | None:
    """(path, body); None where something that it names is not there."""
    path, body = look.path, look.body
    for name in Named.__slots__:
        value: str = getattr(named, name)
        if f"{{{name}}}" in path + body and not value:
            return None
        path, body = (text.replace(f"{{{name}}}", value) for text in (path, body))
    return path, body.encode()
