"""SkyRL's Tinker server, as the benchmarks start it and talk to it: its JAX backend on the CPU.

It answers samples as JSON, which the official SDK no longer reads, so it is asked by plain HTTP.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.lib.peers import Unavailable, python_of
from benchmarks.lib.processes import ServerProcess, free_port
from benchmarks.lib.tinker_http import TinkerHttp, text_prompt

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


@dataclass
class SkyrlModel:
    """A LoRA model of one session, its sampler the version that was published last. All raise
    httpx.HTTPError and RequestFailed."""

    api: TinkerHttp
    session_id: str
    model_id: str
    numbers: "count[int]"
    sampler_id: str = ""

    @classmethod
    async def create(cls, url: str, base_model: str, rank: int) -> "SkyrlModel":
        api = TinkerHttp.connect(url, timeout_s=CALL_LIMIT_S)
        return await cls.in_session(api, await api.create_session(), base_model, rank)

    @classmethod
    async def in_session(
        cls, api: TinkerHttp, session_id: str, base_model: str, rank: int
    ) -> "SkyrlModel":
        lora = {"rank": rank, "seed": 0}
        answer = await api.post(
            "create_model", session_id=session_id, base_model=base_model, lora_config=lora
        )
        await api.retrieve(answer["request_id"])
        return cls(api, session_id, answer["model_id"], count())

    async def another(self, base_model: str, rank: int) -> "SkyrlModel":
        return await self.in_session(self.api, self.session_id, base_model, rank)

    async def forward_backward(
        self, data: Sequence[Mapping[str, Sequence[float]]], loss_fn: str
    ) -> list[dict[str, list[float]]]:
        """data: `tokens` and the loss's inputs. Of each: `elementwise_loss` and `logprobs`."""
        body = {"data": [wire_datum(datum) for datum in data], "loss_fn": loss_fn}
        result = await self._result("forward_backward", forward_backward_input=body)
        return [
            {name: tensor["data"] for name, tensor in output.items()}
            for output in result["loss_fn_outputs"]
        ]

    async def optim_step(self, learning_rate: float) -> None:
        await self._result("optim_step", adam_params={"learning_rate": learning_rate})

    async def publish(self) -> None:
        number = next(self.numbers)
        result = await self._result(
            "save_weights_for_sampler", sampling_session_seq_id=number, seq_id=number
        )
        self.sampler_id = result["sampling_session_id"]

    async def sample(
        self, prompt: Sequence[int], num_samples: int, max_tokens: int, seed: int
    ) -> list[dict[str, Any]]:
        """`tokens` and `logprobs` of each, at temperature 1 over the whole vocabulary."""
        result = await self.api.result(
            "asample",
            sampling_session_id=self.sampler_id,
            seq_id=next(self.numbers),
            num_samples=num_samples,
            prompt=text_prompt(prompt),
            sampling_params={
                "max_tokens": max_tokens,
                "temperature": 1.0,
                "stop": [],
                "seed": seed,
            },
        )
        return result["sequences"]

    async def _result(self, call: str, **body: Any) -> dict[str, Any]:
        return await self.api.result(call, model_id=self.model_id, **body)


def wire_datum(datum: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    inputs = {name: {"data": list(values)} for name, values in datum.items() if name != "tokens"}
    return {"model_input": text_prompt(list(datum["tokens"])), "loss_fn_inputs": inputs}
