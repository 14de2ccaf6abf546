"""SkyRL's Tinker server, as the benchmarks start it and talk to it: its JAX backend on the CPU.

It answers samples as JSON, which the official SDK no longer reads, so it is asked by plain HTTP.
"""

import asyncio
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
from peers.sampling_common import (
    ServerProcess,
    Unavailable,
    free_port,
    python_of,
    version_of,
)

CALL_LIMIT_S = 400.0
"""It holds a question for a result for at most 300 seconds."""


@contextmanager
def skyrl_server(
    peers: Path, model: Path, config: Mapping[str, object], scratch: Path
) -> Iterator[tuple[str, ServerProcess]]:
    """Its URL, for the length of the block. model: a Hugging Face folder. config: of its JAX
    backend. Raises Unavailable."""
    python, port = python_of(peers, "skyrl"), free_port()
    if not (uv := python.parent / "uv").exists():
        raise Unavailable("uv is not in its environment (benchmarks/peers.md)")
    server = ServerProcess(
        [
            # It starts its engine by the `uv run` that it was started by itself.
            *(uv, "run", "--no-project", "-m", "skyrl.tinker.api"),
            *("--host", "127.0.0.1", "--port", str(port), "--base-model", model),
            *("--backend", "jax", "--backend-config", json.dumps(config)),
            *("--checkpoints-base", scratch / "checkpoints"),
            *("--database-url", f"sqlite:///{scratch / 'tinker.db'}"),
        ],
        scratch / "skyrl.log",
        {
            "JAX_PLATFORMS": "cpu",
            "VIRTUAL_ENV": str(python.parent.parent),
            "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
            "UV_OFFLINE": "1",
        },
    )
    try:
        server.await_ready(f"http://127.0.0.1:{port}/api/v1/healthz")
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.stop()


def skyrl_version(peers: Path) -> str:
    """Raises Unavailable."""
    return version_of(python_of(peers, "skyrl"), "skyrl")


@dataclass
class SkyrlModel:
    """A LoRA model of one session, its sampler the version that was published last."""

    http: httpx.AsyncClient
    session_id: str
    model_id: str
    numbers: "count[int]"
    sampler_id: str = ""

    @classmethod
    async def create(cls, url: str, base_model: str, rank: int) -> "SkyrlModel":
        http = httpx.AsyncClient(base_url=url, timeout=CALL_LIMIT_S, trust_env=False)
        told = await post(http, "create_session", sdk_version="0.38.0", tags=[], user_metadata={})
        return await cls.in_session(http, told["session_id"], base_model, rank)

    @classmethod
    async def in_session(
        cls, http: httpx.AsyncClient, session_id: str, base_model: str, rank: int
    ) -> "SkyrlModel":
        """Raises httpx.HTTPError; so do all others."""
        lora = {"rank": rank, "seed": 0}
        told = await post(
            http, "create_model", session_id=session_id, base_model=base_model, lora_config=lora
        )
        await retrieve(http, told["request_id"])
        return cls(http, session_id, told["model_id"], count())

    async def another(self, base_model: str, rank: int) -> "SkyrlModel":
        return await self.in_session(self.http, self.session_id, base_model, rank)

    async def forward_backward(
        self, data: Sequence[Mapping[str, Sequence[float]]], loss_fn: str
    ) -> list[dict[str, list[float]]]:
        """data: `tokens` and the loss's inputs. Of each: `elementwise_loss` and `logprobs`."""
        told = await self._ask(
            "forward_backward",
            forward_backward_input={"data": [wire_datum(one) for one in data], "loss_fn": loss_fn},
        )
        return [
            {name: tensor["data"] for name, tensor in one.items()}
            for one in told["loss_fn_outputs"]
        ]

    async def optim_step(self, learning_rate: float) -> None:
        await self._ask("optim_step", adam_params={"learning_rate": learning_rate})

    async def publish(self) -> None:
        number = next(self.numbers)
        told = await self._ask(
            "save_weights_for_sampler", sampling_session_seq_id=number, seq_id=number
        )
        self.sampler_id = told["sampling_session_id"]

    async def sample(
        self, prompt: Sequence[int], num_samples: int, max_tokens: int, seed: int
    ) -> list[dict[str, Any]]:
        """`tokens` and `logprobs` of each, at temperature 1 over the whole vocabulary."""
        told = await post(
            self.http,
            "asample",
            sampling_session_id=self.sampler_id,
            seq_id=next(self.numbers),
            num_samples=num_samples,
            prompt={"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
            sampling_params={
                "max_tokens": max_tokens,
                "temperature": 1.0,
                "stop": [],
                "seed": seed,
            },
        )
        return (await retrieve(self.http, told["request_id"]))["sequences"]

    async def _ask(self, call: str, **body: Any) -> dict[str, Any]:
        told = await post(self.http, call, model_id=self.model_id, **body)
        return await retrieve(self.http, told["request_id"])


def wire_datum(datum: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    inputs = {name: {"data": list(values)} for name, values in datum.items() if name != "tokens"}
    chunks = [{"type": "encoded_text", "tokens": list(datum["tokens"])}]
    return {"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}


async def post(http: httpx.AsyncClient, call: str, **body: Any) -> dict[str, Any]:
    answer = await http.post(f"/api/v1/{call}", json=body)
    answer.raise_for_status()
    return answer.json()


async def retrieve(http: httpx.AsyncClient, request_id: str) -> dict[str, Any]:
    """The result, however long it takes: whoever calls sets a limit."""
    while True:
        answer = await http.post("/api/v1/retrieve_future", json={"request_id": request_id})
        if answer.status_code != httpx.codes.REQUEST_TIMEOUT:
            answer.raise_for_status()
            return answer.json()
        await asyncio.sleep(0)
