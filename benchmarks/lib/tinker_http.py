"""The Tinker API by plain HTTP over kept-alive connections, without its SDK (docs/api.md)."""

from collections.abc import Sequence
from typing import Any

import httpx

from benchmarks.lib.http_client import http_client

JSON = "application/json"
PROTO = "application/x-protobuf"
SDK_VERSION = "0.38.0"


class RequestFailed(ValueError):
    """A future that ended with an error; the text is the server's."""


class TinkerHttp:
    """The requests. All raise httpx.HTTPError; whoever calls sets limits of time."""

    def __init__(self, http: httpx.AsyncClient):
        self.http = http

    @classmethod
    def connect(cls, url: str, api_key: str = "", timeout_s: float = 300.0) -> "TinkerHttp":
        return cls(http_client(url, timeout_s, {"X-API-Key": api_key} if api_key else None))

    async def create_session(self) -> str:
        answer = await self.post(
            "create_session", sdk_version=SDK_VERSION, tags=[], user_metadata={}
        )
        return answer["session_id"]

    async def create_sampler(self, session_id: str, base_model: str) -> str:
        """The id of a sampling session."""
        answer = await self.post(
            "create_sampling_session",
            session_id=session_id,
            sampling_session_seq_id=0,
            base_model=base_model,
        )
        return answer["sampling_session_id"]

    async def post(self, call: str, **body: Any) -> dict[str, Any]:
        answer = await self.http.post(f"/api/v1/{call}", json=body)
        answer.raise_for_status()
        return answer.json()

    async def retrieve(self, request_id: str, accept: str = JSON) -> httpx.Response:
        """A future's result, asked for again while the server answers 408. Raises
        RequestFailed."""
        body = {"request_id": request_id, "allow_metadata_only": False}
        while True:
            answer = await self.http.post(
                "/api/v1/retrieve_future", json=body, headers={"Accept": accept}
            )
            if answer.status_code != httpx.codes.REQUEST_TIMEOUT:
                break
        answer.raise_for_status()
        if answer.headers["content-type"].startswith(JSON) and answer.json().get("error"):
            raise RequestFailed(answer.text[:300])
        return answer

    async def result(self, call: str, **body: Any) -> dict[str, Any]:
        """Of a call whose result is JSON."""
        request_id = (await self.post(call, **body))["request_id"]
        return (await self.retrieve(request_id)).json()

    async def close(self) -> None:
        await self.http.aclose()


def text_prompt(tokens: Sequence[int]) -> dict[str, Any]:
    return {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}
