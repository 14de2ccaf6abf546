"""Training by plain HTTP: operations of one model, sent and waited for."""

import time
from collections.abc import Iterator
from itertools import count

import httpx
import numpy as np

from benchmarks.lib.server import MODEL
from benchmarks.lib.tinker_http import PROTO, TinkerHttp
from tests.serving import Server
from tinkercloud.wire import codec

ADAM = {
    "learning_rate": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}
RETRY_S = 0.01


class TrainedModel:
    """Sends operations again while no server listens, as the SDK does."""

    def __init__(self, api: TinkerHttp, model_id: str):
        self._api = api
        self._model_id = model_id
        self._seq_ids: Iterator[int] = count(1)

    @classmethod
    async def create(cls, server: Server, rank: int) -> "TrainedModel":
        """rank 0: all parameters are trained."""
        api = TinkerHttp.connect(server.base_url, server.api_key, timeout_s=600)
        session_id = await api.create_session()
        model = await api.result(
            "create_model",
            session_id=session_id,
            base_model=MODEL,
            model_seq_id=0,
            lora_config={"rank": rank},
        )
        return cls(api, model["model_id"])

    async def forward_backward(self, batch: int, tokens: int) -> str:
        """The request id, once it is acknowledged. batch datums of as many tokens."""
        body = forward_backward_body(self._model_id, next(self._seq_ids), batch, tokens)
        while True:
            try:
                answer = await self._api.http.post(
                    "/api/v1/forward_backward", content=body, headers={"Content-Type": PROTO}
                )
            except httpx.TransportError:
                time.sleep(RETRY_S)  # noqa: ASYNC251 - this client does nothing else
                continue
            answer.raise_for_status()
            return answer.json()["request_id"]

    async def optim_step(self) -> str:
        """As `forward_backward`."""
        answer = await self._api.post(
            "optim_step", model_id=self._model_id, seq_id=next(self._seq_ids), adam_params=ADAM
        )
        return answer["request_id"]

    async def step(self, batch: int, tokens: int) -> float:
        """Both, sent before either is waited for; in seconds."""
        began = time.perf_counter()
        requests = [await self.forward_backward(batch, tokens), await self.optim_step()]
        for request_id in requests:
            await self.wait(request_id)
        return time.perf_counter() - began

    async def wait(self, request_id: str) -> None:
        await self._api.retrieve(request_id, PROTO)

    async def unload(self) -> None:
        """Nothing is left of it."""
        await self._api.result("unload_model", model_id=self._model_id)

    async def metrics(self) -> dict[str, float]:
        """Of the server."""
        answer = await self._api.http.get("/metrics")
        lines = (line.split() for line in answer.text.splitlines() if not line.startswith("#"))
        return {words[0]: float(words[1]) for words in lines if len(words) == 2}

    async def close(self) -> None:
        await self._api.close()


def forward_backward_body(model_id: str, seq_id: int, batch: int, tokens: int) -> bytes:
    """Of batch datums of as many tokens."""
    request = codec.ForwardBackwardRequest(
        model_id=model_id,
        seq_id=seq_id,
        data=tuple(_datum(row, tokens) for row in range(batch)),
        loss_fn="cross_entropy",
    )
    return codec.encode_forward_backward_request(request)


def _datum(row: int, tokens: int) -> codec.WireDatum:
    ids = (np.arange(tokens + 1, dtype=np.int64) * 7 + 13 * row) % 40_000
    weights = np.ones(tokens, dtype=np.float32)
    inputs = {"target_tokens": ids[1:], "weights": weights}
    return codec.WireDatum((ids[:-1].astype(np.int32),), inputs)
