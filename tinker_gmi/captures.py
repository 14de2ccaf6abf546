"""Client of capture sessions. Nothing of it is asynchronous: it waits for each answer."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from tinker_gmi.connection.json_client import JsonClient


class Captures(JsonClient):
    """Bodies are those of the API (docs/api.md)."""

    def create(self, **fields: Any) -> dict[str, Any]:
        """model or follow; group, metadata, ttl_s, webhook, idle_s."""
        return self._request("POST", "/captures", fields)

    def list(self, limit: int = 100, offset: int = 0) -> "list[dict[str, Any]]":
        query = {"limit": limit, "offset": offset}
        return self._request("GET", "/captures", params=query)["captures"]

    def get(self, capture_id: str) -> dict[str, Any]:
        return self._request("GET", f"/captures/{capture_id}")

    def change(self, capture_id: str, **weights: str) -> dict[str, Any]:
        """Other weights from the next turn on: model or follow."""
        return self._request("PATCH", f"/captures/{capture_id}", weights)

    def close_turns(self, capture_id: str, **place: str) -> dict[str, Any]:
        """No more turns: of an episode (with its group), or of the whole session."""
        return self._request("POST", f"/captures/{capture_id}/close", place)

    def delete(self, capture_id: str) -> None:
        self._request("DELETE", f"/captures/{capture_id}")

    def reward(self, capture_id: str, value: float, **target: str) -> dict[str, Any]:
        """target: trajectory, turn or episode (with its group), and key; none: the session."""
        return self._request("POST", f"/captures/{capture_id}/rewards", {"value": value, **target})

    def trajectories(self, capture_id: str, **query: Any) -> "list[dict[str, Any]]":
        """query: branches, group, episode, limit, offset."""
        answer = self._request("GET", f"/captures/{capture_id}/trajectories", params=query)
        return answer["trajectories"]

    def datums(self, capture_id: str, **query: Any) -> dict[str, Any]:
        """query: loss, advantages, and those of `trajectories`."""
        return self._request("GET", f"/captures/{capture_id}/datums", params=query)


def datum_of(sdk: ModuleType, fields: Mapping[str, Any]) -> Any:
    """A datum of `Captures.datums` as an object of tinker or of tinker_gmi."""
    inputs = {name: sdk.TensorData(**tensor) for name, tensor in fields["loss_fn_inputs"].items()}
    model_input = sdk.ModelInput.model_validate(fields["model_input"])
    return sdk.Datum(model_input=model_input, loss_fn_inputs=inputs)
