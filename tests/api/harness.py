"""The whole server in this process, on the fake backend, reached over ASGI."""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from tests.waiting import async_wait_for
from tinkercloud.app import create_app
from tinkercloud.backends.base import Backend
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.config import Config
from tinkercloud.services.accounts.usage_recorder import UsageRecorder
from tinkercloud.services.captures.reward_webhooks import RewardWebhooks
from tinkercloud.services.container import Services
from tinkercloud.storage.keys import KeyStore
from tinkercloud.wire.codec import (
    ForwardBackwardRequest,
    WireDatum,
    decode_sample_output,
    decode_train_output,
    encode_forward_backward_request,
)

PROTOBUF = {"content-type": "application/x-protobuf"}


def wire_datum(
    tokens: Sequence[int] = (1, 2, 3, 4), weights: Any = None, **inputs: Any
) -> WireDatum:
    """cross_entropy data: each token predicts its successor.

    inputs replace or add arrays; a plain 0 leaves that input out.
    """
    numbers = np.array(tokens, dtype=np.int32)
    arrays = {
        "target_tokens": np.array([*tokens[1:], 5], dtype=np.int64),
        "weights": np.ones(len(tokens), np.float32) if weights is None else np.array(weights),
    }
    arrays |= {name: np.asarray(value) for name, value in inputs.items()}
    return WireDatum((numbers,), {k: v for k, v in arrays.items() if v.shape != ()})


def body_of(
    model_id: str,
    seq_id: int,
    data: Sequence[WireDatum] | None = None,
    loss_fn: str = "cross_entropy",
    **options: Any,
) -> bytes:
    """A forward_backward request as the official client encodes it."""
    datums = tuple([wire_datum()] if data is None else data)
    request = ForwardBackwardRequest(model_id, seq_id, datums, loss_fn, **options)
    return encode_forward_backward_request(request)


@dataclass
class Api:
    """One user's client. Request helpers return the response; `ok` wants a 200 and its JSON."""

    app: FastAPI
    keys: Mapping[str, str]  # user -> key
    key: str
    http: httpx.AsyncClient = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.app),
            base_url="http://server",
            headers={"X-API-Key": self.key} if self.key else {},
            timeout=30.0,
        )

    def as_user(self, user: str) -> "Api":
        return Api(self.app, self.keys, self.keys[user])

    @property
    def services(self) -> Services:
        return self.app.state.services

    async def post(self, path: str, /, **body: Any) -> httpx.Response:
        return await self.http.post(f"/api/v1/{path}", json=body)

    async def get(self, path: str, **params: Any) -> httpx.Response:
        return await self.http.get(f"/api/v1/{path}", params=params)

    async def ok(self, path: str, /, **body: Any) -> dict[str, Any]:
        response = await self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    async def session(self) -> str:
        return (await self.ok("create_session", tags=[]))["session_id"]

    async def model(self, session_id: str | None = None, number: int = 0, **fields: Any) -> str:
        """A model that is ready to train."""
        session_id = session_id or await self.session()
        body = {"session_id": session_id, "model_seq_id": number, "base_model": "fake/tiny"}
        accepted = await self.ok("create_model", **(body | fields))
        assert (await self.result(accepted))["model_id"] == accepted["model_id"]
        return accepted["model_id"]

    async def forward_backward(
        self, model_id: str, seq_id: int, *args: Any, **options: Any
    ) -> dict[str, Any]:
        """The acknowledgement."""
        body = body_of(model_id, seq_id, *args, **options)
        response = await self.http.post("/api/v1/forward_backward", content=body, headers=PROTOBUF)
        assert response.status_code == 200, response.text
        return response.json()

    async def optim_step(self, model_id: str, seq_id: int | None, **adam: float) -> dict[str, Any]:
        return await self.ok("optim_step", model_id=model_id, seq_id=seq_id, adam_params=adam)

    async def retrieve(self, request_id: str, **headers: str) -> httpx.Response:
        body = {"request_id": request_id, "allow_metadata_only": True}
        return await self.http.post("/api/v1/retrieve_future", json=body, headers=headers)

    async def result(self, accepted: Mapping[str, Any]) -> Any:
        """What became of a request: JSON object, TrainOutput or SampleOutput."""
        response = await self._finished(accepted["request_id"])
        if response.headers["content-type"] == "application/json":
            return response.json()
        sampled = accepted["request_id"].startswith("sample-")
        return (decode_sample_output if sampled else decode_train_output)(response.content)

    async def _finished(self, request_id: str) -> httpx.Response:
        response = await async_wait_for(
            f"{request_id} has an outcome",
            lambda: self.retrieve(request_id),
            lambda answer: answer.status_code != 408,
            poll_s=0.0,
        )
        assert response.status_code == 200, response.text
        return response

    async def failure(self, accepted: Mapping[str, Any], category: str = "user") -> str:
        """The error text of a request that failed as it should."""
        outcome = await self.result(accepted)
        assert isinstance(outcome, dict), f"it did not fail: {outcome}"
        assert outcome.get("category") == category, outcome
        return outcome["error"]

    async def loss(self, model_id: str, seq_id: int) -> float:
        """loss:sum of the default datum, without training on it."""
        accepted = await self.forward_backward(model_id, seq_id, forward_only=True)
        loss = (await self.result(accepted)).metrics["loss:sum"]
        assert math.isfinite(loss)
        return loss

    async def train(self, model_id: str, seq_id: int) -> None:
        """One step on the default datum; takes seq_id and seq_id + 1."""
        await self.forward_backward(model_id, seq_id)
        await self.result(await self.optim_step(model_id, seq_id + 1, learning_rate=0.1))

    async def sample(self, sampler_id: str, **fields: Any) -> dict[str, Any]:
        """The acknowledgement. Two tokens, greedy, unless told otherwise."""
        body: dict[str, Any] = {
            "sampling_session_id": sampler_id,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "sampling_params": {"max_tokens": 2, "temperature": 0.0},
        }
        return await self.ok("asample", **(body | fields))

    async def sampler(self, session_id: str, number: int = 0, **weights: str) -> str:
        weights = weights or {"base_model": "fake/tiny"}
        sampler = await self.ok(
            "create_sampling_session",
            session_id=session_id,
            sampling_session_seq_id=number,
            **weights,
        )
        return sampler["sampling_session_id"]


def without_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers from now on do nothing beside all requests, which they do at times of their own: for
    tests that count what requests read and write."""

    async def nothing(self: object) -> None:
        return

    monkeypatch.setattr(Services, "_sweep_forever", nothing)
    monkeypatch.setattr(RewardWebhooks, "run_forever", nothing)
    monkeypatch.setattr(UsageRecorder, "flush_forever", nothing)


class HeldBackend(FakeBackend):
    """Its operations go on only while `gate` is set, as it is at first. waiting: one of them has
    come to it."""

    def __init__(self, data_dir: Path):
        super().__init__(Config(data_dir=data_dir))
        self.gate, self.waiting = asyncio.Event(), asyncio.Event()
        self.gate.set()

    def hold(self) -> None:
        self.gate.clear()
        self.waiting.clear()

    async def _pause(self) -> None:
        self.waiting.set()
        await self.gate.wait()
        await super()._pause()


@asynccontextmanager
async def serving(
    data_dir: Path,
    *,
    backend: Backend | None = None,
    client_config: Mapping[str, object] | None = None,
    **settings: Any,
) -> AsyncIterator[Api]:
    """A running server with the users "ann" and "bob", the administrator "eve" and a read-only key
    of ann ("reader"); the client is that of ann."""
    config = Config(data_dir=data_dir, backend="fake", **settings)
    app = create_app(config, backend, client_config=client_config)
    store = KeyStore(data_dir)
    keys = {user: store.add(user) for user in ("ann", "bob")}
    keys |= {"eve": store.add("eve", role="admin"), "reader": store.add("ann", role="read-only")}
    store.close()
    async with app.router.lifespan_context(app):
        yield Api(app, keys, keys["ann"] if config.auth else "")
