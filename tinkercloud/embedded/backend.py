"""The embedded backend: each method sends one request to the engine process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from tinkercloud.backends.base import Backend, MakeRoom
from tinkercloud.config import Config
from tinkercloud.core.types import (
    AdamParams,
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
from tinkercloud.embedded.process.host import EngineHost
from tinkercloud.embedded.process.probe import EngineProbe
from tinkercloud.embedded.process.protocol import (
    CopyState,
    CreateModel,
    DeleteModel,
    DropCopy,
    EngineSettings,
    ForwardBackward,
    LoadModel,
    OptimStep,
    Publish,
    Release,
    Request,
    RestoreState,
    Sample,
    SaveModel,
    TrainDraft,
    WriteState,
    WriteVersion,
)
from tinkercloud.errors import ConfigError, MemoryShort

R = TypeVar("R")


class EmbeddedBackend(Backend):
    """Runs one engine process on this machine; `embedded.process.request_handlers` serves it."""

    def __init__(self, config: Config):
        if not config.models:
            raise ConfigError("no model to serve; pass --model NAME=PATH or `tinkercloud fetch`")
        self._host = EngineHost(
            EngineSettings(
                models=config.models,
                dtype=config.dtype,
                cache_dir=config.data_dir / "cache",
                drafts_dir=config.data_dir / "drafts",
                speculate=config.speculate,
                speculate_trace=config.speculate_trace,
                engine=config.engine,
                draft=config.draft,
                log_format=config.log_format,
            )
        )
        self._probe = EngineProbe(self._host)
        self._make_room: MakeRoom = _nothing_to_free

    def use_for_room(self, make_room: MakeRoom) -> None:
        self._make_room = make_room

    async def _call_with_room(self, request: Request[R]) -> R:
        while True:
            try:
                return await self._host.call(request)
            except MemoryShort:
                if not await self._make_room():
                    raise

    async def start(self) -> tuple[ServedModel, ...]:
        return await self._host.start()

    async def loaded(self) -> None:
        await self._host.loaded()

    async def stop(self) -> None:
        await self._host.stop()

    async def create_model(self, model_id: str, base_model: str, lora: LoraSpec) -> None:
        await self._call_with_room(CreateModel(model_id, base_model, lora))

    async def load_model(
        self, model_id: str, base_model: str, directory: Path, *, with_optimizer: bool
    ) -> LoraSpec:
        return await self._call_with_room(
            LoadModel(model_id, base_model, directory, with_optimizer)
        )

    async def delete_model(self, model_id: str) -> None:
        await self._host.call(DeleteModel(model_id))

    async def forward_backward(self, model_id: str, batch: TrainBatch) -> TrainOutput:
        return await self._call_with_room(ForwardBackward(model_id, batch))

    async def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        return await self._host.call(OptimStep(model_id, params))

    async def save_model(self, model_id: str, directory: Path, *, with_optimizer: bool) -> None:
        await self._host.call(SaveModel(model_id, directory, with_optimizer))

    async def publish(self, source: WeightsSource) -> str:
        return await self._call_with_room(Publish(source))

    async def release(self, version: str) -> None:
        await self._host.call(Release(version))

    async def sample(
        self, version: str, request: SampleRequest, on_tokens: OnTokens | None = None
    ) -> SampleOutput:
        streams = on_tokens is not None
        return await self._host.call(Sample(version, request, streams), on_tokens)

    def stats(self) -> dict[str, float | int | str]:
        health = {"engine_alive": int(self._host.alive), "engine_restarts": self._host.incarnation}
        return {**self._host.stats.values, **health}

    def incarnation(self) -> int | None:
        return self._host.incarnation

    def numerics(self) -> str:
        return self._host.numerics

    async def copy_state(self, model_id: str) -> int:
        return await self._host.call(CopyState(model_id))

    async def write_state(self, copy: int, directory: Path) -> StateCost:
        return await self._host.call(WriteState(copy, directory))

    async def drop_copy(self, copy: int) -> None:
        await self._host.call(DropCopy(copy))

    async def write_version(self, version: str, directory: Path) -> None:
        await self._host.call(WriteVersion(version, directory))

    async def restore_state(self, model_id: str, base_model: str, directory: Path) -> None:
        await self._call_with_room(RestoreState(model_id, base_model, directory))

    def queue_state(self, subject: str) -> str | None:
        return self.trouble()

    def trouble(self) -> str | None:
        return self._host.trouble

    async def readiness(self) -> Mapping[str, str | None]:
        return {"engine": self.trouble() or await self._probe.silence()}

    def speculation(self) -> dict[str, Any]:
        return self._host.stats.speculation

    async def train_draft(self, base_model: str) -> None:
        await self._host.call(TrainDraft(base_model))

    def metrics(self) -> list[str]:
        return self._host.stats.metrics


async def _nothing_to_free() -> bool:
    return False
