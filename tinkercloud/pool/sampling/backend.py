"""The backend of a server that samples a pool's models too: those alone are handled here, all else
by the backend that it is made around.

A pool's model is never trained: it has no weights here, and llama.cpp computes no gradients.
"""

import asyncio
from collections.abc import Mapping
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import httpx

from tinkercloud.backends.base import Backend, MakeRoom
from tinkercloud.chat.text_model import TextModel
from tinkercloud.core.types import (
    AdamParams,
    FromBase,
    FromCheckpoint,
    LoraSpec,
    OnTokens,
    SampleOutput,
    SampleRequest,
    ServedModel,
    StateCost,
    TrainBatch,
    TrainOutput,
    WeightsSource,
)
from tinkercloud.errors import ConfigError, UserError, VersionLost
from tinkercloud.pool.model_file import model_parts, read_model_file
from tinkercloud.pool.pool_file import Coordinator, Model, load_pool
from tinkercloud.pool.sampling.pooled_model import PooledModel
from tinkercloud.weights.gguf_file import GGUFFile
from tinkercloud.weights.tokenizer import ensure_tokenizer_folder

ANSWER_S, CONNECT_S = 600.0, 10.0
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
VERSION = "pool-version-"


class PooledBackend(Backend):
    """inner: whose models come first. transport: in place of HTTP's own."""

    def __init__(
        self,
        inner: Backend,
        pool_file: Path,
        cache_dir: Path,
        transport: httpx.AsyncBaseTransport | None = None,
    ):
        self._inner = inner
        self._transport = transport
        self._pool_file, self._cache_dir = pool_file, cache_dir
        self._http: httpx.AsyncClient | None = None
        self._models: dict[str, PooledModel] = {}
        self._versions: dict[str, PooledModel] = {}
        self._numbers = count()

    async def start(self) -> tuple[ServedModel, ...]:
        pool = load_pool(self._pool_file)
        served = await self._inner.start()
        try:
            self._http = _client(pool.coordinator, self._transport)
            for model in pool.models:
                if model.name in (each.name for each in served):
                    raise ConfigError(
                        f"{self._pool_file} has a model {model.name!r}, and this server another one"
                    )
                self._models[model.name] = await asyncio.to_thread(self._opened, model, self._http)
        except BaseException:  # cancelled too: clients and the inner backend are open
            await self.stop()
            raise
        return (*served, *(model.served for model in self._models.values()))

    def _opened(self, model: Model, http: httpx.AsyncClient) -> PooledModel:
        """Raises ConfigError."""
        served = _served(model, self._cache_dir)
        return PooledModel(model, served, TextModel.of(served).codec, http)

    async def stop(self) -> None:
        if self._http is not None:
            await self._http.aclose()
        await self._inner.stop()

    async def publish(self, source: WeightsSource) -> str:
        if isinstance(source, FromBase) and source.base_model in self._models:
            version = f"{VERSION}{next(self._numbers)}"
            self._versions[version] = self._models[source.base_model]
            return version
        if isinstance(source, FromCheckpoint):
            self._require_own(source.base_model)
        return await self._inner.publish(source)

    async def release(self, version: str) -> None:
        if version.startswith(VERSION):
            self._versions.pop(version, None)
        else:
            await self._inner.release(version)

    async def sample(
        self, version: str, request: SampleRequest, on_tokens: OnTokens | None = None
    ) -> SampleOutput:
        if not version.startswith(VERSION):
            return await self._inner.sample(version, request, on_tokens)
        if version not in self._versions:
            raise VersionLost(version)
        return await self._versions[version].sample(request, on_tokens)

    def queue_state(self, subject: str) -> str | None:
        model = self._versions.get(subject)
        if model is None:
            return self._inner.queue_state(subject)
        return "the pool's llama-server is busy with other samples" if model.is_full else None

    # what a pool's model cannot

    def _require_own(self, base_model: str) -> None:
        if base_model in self._models:
            _refuse(base_model)

    async def create_model(self, model_id: str, base_model: str, lora: LoraSpec) -> None:
        self._require_own(base_model)
        await self._inner.create_model(model_id, base_model, lora)

    async def load_model(
        self, model_id: str, base_model: str, directory: Path, *, with_optimizer: bool
    ) -> LoraSpec:
        self._require_own(base_model)
        return await self._inner.load_model(
            model_id, base_model, directory, with_optimizer=with_optimizer
        )

    async def restore_state(self, model_id: str, base_model: str, directory: Path) -> None:
        self._require_own(base_model)
        await self._inner.restore_state(model_id, base_model, directory)

    async def train_draft(self, base_model: str) -> None:
        self._require_own(base_model)
        await self._inner.train_draft(base_model)

    async def write_version(self, version: str, directory: Path) -> None:
        if version in self._versions:
            _refuse(self._versions[version].served.name)
        await self._inner.write_version(version, directory)

    # all else

    async def loaded(self) -> None:
        await self._inner.loaded()

    async def delete_model(self, model_id: str) -> None:
        await self._inner.delete_model(model_id)

    async def forward_backward(self, model_id: str, batch: TrainBatch) -> TrainOutput:
        return await self._inner.forward_backward(model_id, batch)

    async def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        return await self._inner.optim_step(model_id, params)

    async def save_model(self, model_id: str, directory: Path, *, with_optimizer: bool) -> None:
        await self._inner.save_model(model_id, directory, with_optimizer=with_optimizer)

    def use_for_room(self, make_room: MakeRoom) -> None:
        self._inner.use_for_room(make_room)

    def incarnation(self) -> int | None:
        return self._inner.incarnation()

    def numerics(self) -> str:
        return self._inner.numerics()

    async def copy_state(self, model_id: str) -> int:
        return await self._inner.copy_state(model_id)

    async def write_state(self, copy: int, directory: Path) -> StateCost:
        return await self._inner.write_state(copy, directory)

    async def drop_copy(self, copy: int) -> None:
        await self._inner.drop_copy(copy)

    def trouble(self) -> str | None:
        return self._inner.trouble()

    async def readiness(self) -> Mapping[str, str | None]:
        """Without the pool: what others sample and train goes on when it is away."""
        return await self._inner.readiness()

    def speculation(self) -> dict[str, Any]:
        return self._inner.speculation()

    def metrics(self) -> list[str]:
        return self._inner.metrics()

    def stats(self) -> dict[str, float | int | str]:
        return {**self._inner.stats(), "num_pool_models": len(self._models)}


def _refuse(name: str) -> NoReturn:
    raise UserError(
        f"{name} is a pool's model and samples only: llama.cpp trains nothing. Train a base model "
        "that this server has loaded itself (--model)"
    )


def _client(
    coordinator: Coordinator, transport: httpx.AsyncBaseTransport | None
) -> httpx.AsyncClient:
    """Raises ConfigError."""
    key = coordinator.key()
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S, pool=None)
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(
        base_url=coordinator.url,
        headers=headers,
        timeout=timeout,
        limits=limits,
        transport=transport,
        trust_env=False,
    )


def _served(model: Model, cache_dir: Path) -> ServedModel:
    """Of its file. Raises ConfigError."""
    file = read_model_file(model.path)
    parts = [GGUFFile(part) for part in model_parts(model.path)]
    metadata = parts[0].metadata
    ends = (metadata.get(f"tokenizer.ggml.{key}") for key in END_KEYS)
    trained = file.trained_context or model.context
    return ServedModel(
        model.name,
        file.architecture,
        max_context_length=min(model.context, trained),
        vocab_size=file.vocabulary,
        num_parameters=sum(prod(t.shape) for part in parts for t in part.tensors.values()),
        tokenizer_path=ensure_tokenizer_folder(parts[0].path, cache_dir),
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if isinstance(end, int))),
        dtype="float32",
    )
