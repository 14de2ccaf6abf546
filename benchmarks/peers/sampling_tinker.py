"""Servers that speak the Tinker API, by plain HTTP: ours, and SkyRL's.

The API answers whole samples, so the time to a first token is that of a load with `max_tokens` 1.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import httpx

from benchmarks.lib.peers import Unavailable, version_of
from benchmarks.lib.server import MODEL, embedded_flags, engine_flags, our_server
from benchmarks.lib.tinker_http import JSON, PROTO, RequestFailed, TinkerHttp, text_prompt
from benchmarks.peers.sampling_common import Load, Outcome, outcome
from benchmarks.peers.skyrl_server import skyrl_server
from tinkercloud import __version__
from tinkercloud.wire import codec

SKYRL_CHECK_S = 90.0


class TinkerClient:
    """One sampling session of a base model."""

    def __init__(self, api: TinkerHttp, sampler_id: str, accept: str):
        self._api = api
        self._sampler_id = sampler_id
        self._accept = accept
        self._numbers = count()

    @classmethod
    async def connect(cls, api: TinkerHttp, base_model: str, accept: str = PROTO) -> "TinkerClient":
        session_id = await api.create_session()
        return cls(api, await api.create_sampler(session_id, base_model), accept)

    async def generate(self, load: Load) -> Outcome:
        start = time.perf_counter()
        sizes = (load.max_tokens, load.num_samples, load.greedy)
        requests = (self.sample(prompt, *sizes) for prompt in load.prompts)
        answers = await asyncio.gather(*requests, return_exceptions=True)
        samples = [s for a in answers if not isinstance(a, BaseException) for s in a]
        return outcome(load, start, samples)

    async def sample(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        num_samples: int = 1,
        greedy: bool = False,
        seed: int | None = None,
    ) -> list[list[int]]:
        """The tokens of each sample. seed None: the number of the request. Raises httpx.HTTPError,
        or RequestFailed."""
        number = next(self._numbers)
        params = {"max_tokens": max_tokens, "temperature": 0.0 if greedy else 1.0, "stop": []}
        submitted = await self._api.post(
            "asample",
            sampling_session_id=self._sampler_id,
            seq_id=number,
            num_samples=num_samples,
            prompt=text_prompt(prompt),
            sampling_params={
                **params,
                "seed": number if seed is None else seed,
                "top_k": -1,
                "top_p": 1.0,
            },
        )
        answer = await self._api.retrieve(submitted["request_id"], self._accept)
        if not answer.headers["content-type"].startswith(JSON):
            output = codec.decode_sample_output(answer.content)
            return [sequence.tokens.tolist() for sequence in output.sequences]
        fields = answer.json()
        if "sequences" not in fields:
            raise RequestFailed(str(fields)[:300])
        return [sequence["tokens"] for sequence in fields["sequences"]]

    async def close(self) -> None:
        await self._api.close()


class TinkerServer:
    """A server with a client on it."""

    def __init__(
        self, name: str, version: str, client: TinkerClient, pid: int | None, stack: ExitStack
    ):
        self.name = name
        self.version = version
        self.client = client
        self.pid = pid
        self._stack = stack

    @classmethod
    async def ours(cls, model: Path, dtype: str, *flags: str) -> "TinkerServer":
        """model: GGUF file or Hugging Face folder. flags: more of the server's."""
        stack = ExitStack()
        flags = (*embedded_flags(model, dtype), *engine_flags(), *flags)
        server = stack.enter_context(our_server(*flags))
        api = TinkerHttp.connect(server.base_url, server.api_key)
        pid = None if server.process is None else server.process.pid
        client = await TinkerClient.connect(api, MODEL)
        return cls("tinkercloud", __version__, client, pid, stack)

    @classmethod
    async def skyrl(cls, peers: Path, model: Path, max_sequences: int) -> "TinkerServer":
        """Its JAX backend on the CPU, float32. Raises Unavailable."""
        version = version_of(peers, "skyrl")
        config = {"sample_max_num_sequences": max_sequences, "max_lora_adapters": 2}
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            url, server = stack.enter_context(skyrl_server(peers, model, config, folder))
            try:
                client = await TinkerClient.connect(TinkerHttp.connect(url), str(model), JSON)
                async with asyncio.timeout(SKYRL_CHECK_S):
                    await client.sample((1, 2, 3), 2)
            except (httpx.HTTPError, RequestFailed, TimeoutError) as error:
                reason = f"{error or 'no answer in time'}; {server.last_words()}"
                raise Unavailable(f"does not sample: {reason}") from error
            return cls("SkyRL tinker", version, client, server.pid, stack.pop_all())

    async def prepare(self, load: Load) -> None:
        await self.client.generate(load.warm_up)

    async def generate(self, load: Load) -> Outcome:
        return await self.client.generate(load)

    async def latency(self, load: Load) -> Outcome:
        """A request's first token cannot come before all of a load with one token is submitted and
        read, so each sequence's is taken from its own answer."""
        start, first_s = time.perf_counter(), []

        async def first_token(prompt: tuple[int, ...]) -> None:
            await self.client.sample(prompt, 1, load.num_samples)
            first_s.extend([time.perf_counter() - start] * load.num_samples)

        await asyncio.gather(*map(first_token, load.prompts))
        return Outcome(time.perf_counter() - start, [], first_s=first_s)

    async def close(self) -> None:
        await self.client.close()
        self._stack.close()
