"""A client of JSON routes that no session is needed for. It waits for each answer."""

from collections.abc import Mapping
from typing import Any

import httpx

from tinker_gmi.connection import settings
from tinker_gmi.connection.closing import ClosesOnExit
from tinker_gmi.connection.errors import APIConnectionError, status_error
from tinker_gmi.connection.transport import body_of

TIMEOUT_S = 120.0


class JsonClient(ClosesOnExit):
    """base_url, api_key: by default TINKER_BASE_URL and TINKER_API_KEY. Raises the errors of
    `errors`."""

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

    def close(self) -> None:
        self._client.close()

    def _request(
        self, method: str, path: str, body: Any = None, params: Mapping[str, Any] | None = None
    ) -> Any:
        """path: below /api/v1."""
        try:
            response = self._client.request(method, f"/api/v1{path}", json=body, params=params)
        except httpx.TransportError as error:
            raise APIConnectionError(
                f"no answer from {self._client.base_url}: {error!r}; "
                "is TINKER_BASE_URL what the server printed?"
            ) from error
        if not response.is_success:
            raise status_error(response.status_code, body_of(response))
        return response.json() if response.content else {}
