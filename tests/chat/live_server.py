"""A server in a thread of this process, with a backend that says what a test wrote.

Client packages reach it over a real socket. What the model says is chosen by the test, since no
model of a test's size calls tools by itself."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import tinker_gmi
from tests.api.thread_server import serve
from tests.chat.model_folder import SPECIAL, write_model_folder
from tinkercloud.app import create_app
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.config import Config, ModelSource
from tinkercloud.core.types import (
    OnTokens,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    ServedModel,
    TokenChunk,
)
from tinkercloud.storage.keys import KeyStore

MODEL = "chatty"
CONTEXT = 32768


class ScriptedBackend(FakeBackend):
    """Every sample says the next text of `script`, a token at a time; without one, what the fake
    model draws. requests: what was asked for."""

    def __init__(self, config: Config, tokenizer: Tokenizer):
        super().__init__(config)
        self._tokenizer = tokenizer
        self.script: list[str] = []
        self.requests: list[SampleRequest] = []
        self.pause_s = 0.0  # before each token
        self.cancelled = threading.Event()  # a sample was

    async def start(self) -> tuple[ServedModel, ...]:
        """With room for the instructions of agent frameworks."""
        return tuple(replace(model, max_context_length=CONTEXT) for model in await super().start())

    async def sample(
        self, version: str, request: SampleRequest, on_tokens: OnTokens | None = None
    ) -> SampleOutput:
        self.requests.append(request)
        if not self.script:
            return await super().sample(version, request, on_tokens)
        try:
            drawn = [await self._say(index, on_tokens) for index in range(request.num_samples)]
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return SampleOutput(tuple(drawn), prompt_cache_hit_tokens=3)

    async def _say(self, index: int, on_tokens: OnTokens | None) -> SampledSequence:
        text = self._tokenizer.encode(self.script.pop(0)).ids
        tokens = np.array([*text, self._tokenizer.token_to_id(SPECIAL[2])], np.int32)
        logprobs = np.linspace(-1, 0, len(tokens), dtype=np.float32)
        for place in range(len(tokens)):
            await self.pause(place)
            if on_tokens is not None:
                one = slice(place, place + 1)
                reason = "stop" if place == len(tokens) - 1 else None
                on_tokens(TokenChunk(index, tokens[one], logprobs[one], reason))
        return SampledSequence(tokens, logprobs, "stop")

    async def pause(self, place: int) -> None:
        """Before the token of this place."""
        await asyncio.sleep(self.pause_s)

    def prompts(self) -> list[str]:
        return [
            self._tokenizer.decode(request.prompt.tolist(), skip_special_tokens=False)
            for request in self.requests
        ]


@dataclass(frozen=True)
class LiveServer:
    url: str
    keys: dict[str, str]
    backend: ScriptedBackend

    def checkpoint(self, user: str, name: str) -> str:
        """The path of a new checkpoint of this user's."""
        service = tinker_gmi.ServiceClient(base_url=self.url, api_key=self.keys[user])
        model = service.create_lora_training_client(MODEL, rank=8).result()
        path = model.save_weights_for_sampler(name).result().path
        service.close("success")
        assert path is not None
        return path

    @property
    def openai_url(self) -> str:
        return f"{self.url}/oai/api/v1"

    @property
    def anthropic_url(self) -> str:
        return f"{self.url}/anthropic/api"


@contextmanager
def live_server(
    folder: Path, backend_type: type[ScriptedBackend] = ScriptedBackend
) -> Iterator[LiveServer]:
    """With the users "ann" and "bob"."""
    source = ModelSource(MODEL, write_model_folder(folder / MODEL))
    config = Config(data_dir=folder / "data", backend="fake", models=(source,))
    tokenizer = Tokenizer.from_file(str(source.path / "tokenizer.json"))
    backend = backend_type(config, tokenizer)
    config.data_dir.mkdir(parents=True)
    store = KeyStore(config.data_dir)
    keys = {user: store.add(user) for user in ("ann", "bob")}
    store.close()
    with serve(create_app(config, backend)) as base_url:
        yield LiveServer(base_url, keys, backend)
