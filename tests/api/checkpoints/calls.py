"""Checkpoints over the API: saved, published, loaded."""

from tests.api.harness import Api


async def saved(api: Api, kind: str = "save_weights") -> tuple[str, str]:
    """(model id, path) of a model after one step, and its checkpoint "ck1"."""
    model_id = await api.model(lora_config={"rank": 8, "seed": 4}, user_metadata={"secret": "s"})
    await api.train(model_id, 1)
    accepted = await api.ok(kind, model_id=model_id, path="ck1", seq_id=3)
    return model_id, (await api.result(accepted))["path"]


def url(path: str, verb: str = "") -> str:
    run, _, checkpoint = path.removeprefix("tinker://").partition("/")
    return f"/api/v1/training_runs/{run}/checkpoints/{checkpoint}{verb}"


async def publish(api: Api, path: str) -> None:
    assert (await api.http.post(url(path, "/publish"))).status_code == 204


async def unpublish(api: Api, path: str) -> None:
    assert (await api.http.delete(url(path, "/publish"))).status_code == 204


async def load(api: Api, path: str, *, optimizer: bool = False) -> str:
    """A model made from a checkpoint, in a session of its own."""
    session_id = await api.session()
    accepted = await api.ok(
        "load_weights", session_id=session_id, model_seq_id=0, path=path, optimizer=optimizer
    )
    result = await api.result(accepted)
    assert result == {"path": path, "model_id": f"{session_id}:train:0", "type": "load_weights"}
    return result["model_id"]
