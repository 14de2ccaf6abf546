"""Servers that speak the Tinker API, by plain HTTP: ours, and SkyRL's.

The API answers whole samples, so the time to a first token is that of a load with `max_tokens` 1.
"""

import asyncio
import tempfile
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import httpx
from peers.sampling_common import Load, Outcome, Unavailable, outcome
from peers.skyrl_server import skyrl_server, skyrl_version

from tests.serving import start_server
from tinkercloud import __version__
from tinkercloud.wire import codec

PROTO = "application/x-protobuf"
LIMIT_S = 300.0
SKYRL_CHECK_S = 90.0
MODEL = "smollm2"


class TinkerClient:
    """One sampling session of a base model."""

    def __init__(self, http: httpx.AsyncClient, sampler_id: str, accept: str):
        self._http = http
        self._sampler_id = sampler_id
        self._accept = accept
        self._numbers = count()

    @classmethod
    async def connect(
        cls, url: str, key: str, base_model: str, accept: str = PROTO
    ) -> "TinkerClient":
        limits = httpx.Limits(max_connections=512, max_keepalive_connections=512)
        headers = {"X-API-Key": key}
        http = httpx.AsyncClient(
            base_url=url, headers=headers, limits=limits, timeout=LIMIT_S, trust_env=False
        )
        session = await cls._post(
            http, "create_session", sdk_version="0.38.0", tags=[], user_metadata={}
        )
        sampler = await cls._post(
            http,
            "create_sampling_session",
            session_id=session["session_id"],
            sampling_session_seq_id=0,
            base_model=base_model,
        )
        return cls(http, sampler["sampling_session_id"], accept)

    async def generate(self, load: Load) -> Outcome:
        begun = time.perf_counter()
        sizes = (load.max_tokens, load.num_samples, load.greedy)
        asked = (self.sample(prompt, *sizes) for prompt in load.prompts)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        samples = [s for a in answers if not isinstance(a, BaseException) for s in a]
        return outcome(load, begun, samples)

    async def sample(
        self, prompt: tuple[int, ...], max_tokens: int, num_samples: int = 1, greedy: bool = False
    ) -> list[list[int]]:
        """The tokens of each sample. Raises httpx.HTTPError, or ValueError for a failed future."""
        number = next(self._numbers)
        params = {"max_tokens": max_tokens, "temperature": 0.0 if greedy else 1.0, "stop": []}
        submitted = await self._post(
            self._http,
            "asample",
            sampling_session_id=self._sampler_id,
            seq_id=number,
            num_samples=num_samples,
            prompt={"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
            sampling_params={**params, "seed": number, "top_k": -1, "top_p": 1.0},
        )
        return await self._retrieve(submitted["request_id"])

    async def close(self) -> None:
        await self._http.aclose()

    @staticmethod
    async def _post(http: httpx.AsyncClient, call: str, **body: Any) -> dict[str, Any]:
        answer = await http.post(f"/api/v1/{call}", json=body)
        answer.raise_for_status()
        return answer.json()

    async def _retrieve(self, request_id: str) -> list[list[int]]:
        body = {"request_id": request_id, "allow_metadata_only": False}
        headers = {"Accept": self._accept}
        while True:
            answer = await self._http.post("/api/v1/retrieve_future", json=body, headers=headers)
            if answer.status_code != httpx.codes.REQUEST_TIMEOUT:
                break
        answer.raise_for_status()
        if not answer.headers["content-type"].startswith("application/json"):
            output = codec.decode_sample_output(answer.content)
            return [sequence.tokens.tolist() for sequence in output.sequences]
        told = answer.json()
        if "sequences" not in told:
            raise ValueError(f"a sample failed: {str(told)[:300]}")
        return [sequence["tokens"] for sequence in told["sequences"]]


class TinkerServer:
    """A server with a client on it."""

    def __init__(
        self, name: str, version: str, client: TinkerClient, pid: int | None, ended: ExitStack
    ):
        self.name = name
        self.version = version
        self.client = client
        self.pid = pid
        self._ended = ended

    @classmethod
    async def ours(
        cls, model: Path, dtype: str, max_batch: int, kv_cache_bytes: int
    ) -> "TinkerServer":
        """model: GGUF file or Hugging Face folder."""
        ended = ExitStack()
        folder = ended.enter_context(tempfile.TemporaryDirectory())
        flags = ("--engine-max-batch", str(max_batch), "--engine-kv-cache-bytes")
        server = ended.enter_context(
            start_server(
                *("--backend", "embedded", "--model", f"{MODEL}={model}", "--dtype", dtype),
                *(*flags, str(kv_cache_bytes)),
                data_dir=Path(folder) / "data",
            )
        )
        client = await TinkerClient.connect(server.base_url, server.api_key, MODEL)
        pid = None if server.process is None else server.process.pid
        return cls("tinkercloud", __version__, client, pid, ended)

    @classmethod
    async def skyrl(cls, peers: Path, model: Path, max_sequences: int) -> "TinkerServer":
        """Its JAX backend on the CPU, float32. Raises Unavailable."""
        version, ended = skyrl_version(peers), ExitStack()
        folder = Path(ended.enter_context(tempfile.TemporaryDirectory()))
        config = {"sample_max_num_sequences": max_sequences, "max_lora_adapters": 2}
        try:
            url, server = ended.enter_context(skyrl_server(peers, model, config, folder))
        except Unavailable:
            ended.close()
            raise
        try:
            client = await TinkerClient.connect(url, "tml-none", str(model), "application/json")
            async with asyncio.timeout(SKYRL_CHECK_S):
                await client.sample((1, 2, 3), 2)
        except (httpx.HTTPError, ValueError, TimeoutError) as error:
            said = server.last_words()
            ended.close()
            raise Unavailable(f"does not sample: {error or 'no answer in time'}; {said}") from error
        return cls("SkyRL tinker", version, client, server.pid, ended)

    async def prepare(self, load: Load) -> None:
        """A short load of the same shape: whatever is made at the first request is made now."""
        prompts = tuple(prompt[:8] for prompt in load.prompts)
        await self.client.generate(Load(prompts, 4, load.num_samples))

    async def generate(self, load: Load) -> Outcome:
        return await self.client.generate(load)

    async def latency(self, load: Load) -> Outcome:
        """A request's first token cannot come before all of a load with one token is submitted and
        read, so each sequence's is taken from its own answer."""
        begun, first_s = time.perf_counter(), []

        async def one(prompt: tuple[int, ...]) -> None:
            await self.client.sample(prompt, 1, load.num_samples)
            first_s.extend([time.perf_counter() - begun] * load.num_samples)

        await asyncio.gather(*map(one, load.prompts))
        return Outcome(time.perf_counter() - begun, [], first_s=first_s)

    async def close(self) -> None:
        await self.client.close()
        self._ended.close()
