"""Answers of /models."""

from collections.abc import Sequence
from typing import Any

from tinkercloud.core.types import ServedModel

OWNER = "tinkercloud"


def model_json(name: str, created: int = 0, owner: str = OWNER) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": owner}


def models_json(
    served: Sequence[ServedModel], checkpoints: Sequence[tuple[str, float]], user: str
) -> dict[str, Any]:
    """checkpoints: the user's, by path, with the time of their making in unix seconds."""
    models = [
        model_json(model.name) | {"max_model_len": model.max_context_length} for model in served
    ]
    models += [model_json(path, int(created), user) for path, created in checkpoints]
    return {"object": "list", "data": models}
