"""Client of capture sessions. Nothing of it is asynchronous: it waits for each answer."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import httpx

from tinker_gmi.connection import settings
from tinker_gmi.connection.closing import ClosesOnExit
from tinker_gmi.connection.errors import APIConnectionError, status_error
from tinker_gmi.connection.transport import body_of

TIMEOUT_S = 120.0


class Captures(ClosesOnExit):
    """base_url, api_key: by default TINKER_BASE_URL and TINKER_API_KEY. Bodies are those of the
    API (docs/api.md). Raises the errors of `errors`."""

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        http_transport: httpx.BaseTransport | None = None,
    ):
        key = settings.api_key(api_key)
        self._client = httpx.Client(
            base_url=settings.base_url(base_url),
            headers={"X-API-Key": key} if key else {},
            timeout=TIMEOUT_S,
            transport=http_transport,
        )

    def create(self, **fields: Any) -> dict[str, Any]:
        """model or follow; group, metadata, ttl_s, webhook, idle_s."""
        return self._request("POST", "", fields)

    def list(self, limit: int = 100, offset: int = 0) -> "list[dict[str, Any]]":
        query = {"limit": limit, "offset": offset}
        return self._request("GET", "", params=query)["captures"]

    def get(self, capture_id: str) -> dict[str, Any]:
        return self._request("GET", f"/{capture_id}")

    def change(self, capture_id: str, **weights: str) -> dict[str, Any]:
        """Other weights from the next turn on: model or follow."""
        return self._request("PATCH", f"/{capture_id}", weights)

    def close_turns(self, capture_id: str, **place: str) -> dict[str, Any]:
        """No more turns: of an episode (with its group), or of the whole session."""
        return self._request("POST", f"/{capture_id}/close", place)

    def delete(self, capture_id: str) -> None:
        self._request("DELETE", f"/{capture_id}")

    def reward(self, capture_id: str, value: float, **target: str) -> dict[str, Any]:
        """target: trajectory, turn or episode (with its group), and key; none: the session."""
        return self._request("POST", f"/{capture_id}/rewards", {"value": value, **target})

    def trajectories(self, capture_id: str, **query: Any) -> "list[dict[str, Any]]":
        """query: branches, group, episode, limit, offset."""
        answer = self._request("GET", f"/{capture_id}/trajectories", params=query)
        return answer["trajectories"]

    def datums(self, capture_id: str, **query: Any) -> dict[str, Any]:
        """query: loss, advantages, and those of `trajectories`."""
        return self._request("GET", f"/{capture_id}/datums", params=query)

    def close(self) -> None:
        self._client.close()

    def _request(
        self, method: str, path: str, body: Any = None, params: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            response = self._client.request(
                method, f"/api/v1/captures{path}", json=body, params=params
            )
        except httpx.TransportError as error:
            raise APIConnectionError(
                f"no answer from {self._client.base_url}: {error!r}; "
                "is TINKER_BASE_URL what the server printed?"
            ) from error
        if not response.is_success:
            raise status_error(response.status_code, body_of(response))
        return response.json() if response.content else {}


def datum_of(sdk: ModuleType, fields: Mapping[str, Any]) -> Any:
    """A datum of `Captures.datums` as an object of tinker or of tinker_gmi."""
    inputs = {name: sdk.TensorData(**tensor) for name, tensor in fields["loss_fn_inputs"].items()}
    model_input = sdk.ModelInput.model_validate(fields["model_input"])
    return sdk.Datum(model_input=model_input, loss_fn_inputs=inputs)
