"""A backend for documentation, tests and client development: deterministic, in memory, no torch.

It is a real, if tiny, language model (`fake_model`): it learns, accumulates gradients, keeps Adam
state, publishes immutable versions and samples by position-keyed noise, all exactly and at once.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TypeVar

import numpy as np

from tinkercloud import flushing
from tinkercloud.backends.base import Backend
from tinkercloud.backends.fake_model import (
    NUM_BUCKETS,
    BaseWeights,
    ModelState,
    Published,
    adamw,
    check_fits,
    read_state,
    train,
    write_state,
)
from tinkercloud.backends.fake_recovery import read_model, write_model
from tinkercloud.backends.fake_sampling import draw_samples
from tinkercloud.config import Config
from tinkercloud.core.types import (
    AdamParams,
    AdapterSizes,
    FromBase,
    FromCheckpoint,
    FromModel,
    LoraSpec,
    OnTokens,
    SampleOutput,
    SampleRequest,
    ServedModel,
    StateCost,
    TokenChunk,
    TrainBatch,
    TrainOutput,
    WeightsSource,
)
from tinkercloud.errors import (
    BaseModelNotServed,
    EngineDied,
    GradientNotFinite,
    ModelStateLost,
    StateCopyLost,
    UserError,
    VersionLost,
    WeightsNotFinite,
)
from tinkercloud.losses.custom.graph import CUSTOM

TINY = ServedModel(
    name="fake/tiny",
    architecture="fake",
    max_context_length=2048,
    vocab_size=1000,
    num_parameters=16_000,
    tokenizer_path=None,
    eos_token_ids=(2,),
    dtype="float32",
    adapter_sizes=AdapterSizes(unembed=2 * 1000),
)
FLOAT32_MAX = float(np.finfo(np.float32).max)  # what other backends hold
INLINE_TOKENS = 256  # more than this many are computed off the event loop

Result = TypeVar("Result")


class FakeBackend(Backend):
    """latency_s: how long every operation takes at least."""

    def __init__(self, config: Config, *, latency_s: float = 0.0):
        served = [TINY, *(_served(source.name, source.path) for source in config.models)]
        self._bases = {model.name: BaseWeights.of(model) for model in served}
        self._latency_s = latency_s
        self._models: dict[str, ModelState] = {}
        self._versions: dict[str, Published] = {}
        self._copies: dict[int, tuple[str, ModelState]] = {}
        self._numbers = count()
        self._stopped = False

    async def start(self) -> tuple[ServedModel, ...]:
        self._stopped = False
        return tuple(base.served for base in self._bases.values())

    async def stop(self) -> None:
        self._stopped = True

    async def create_model(self, model_id: str, base_model: str, lora: LoraSpec) -> None:
        await self._pause()
        table = self._base(base_model).fresh_table()
        self._models[model_id] = ModelState(base_model, lora, table, table, table)

    async def load_model(
        self, model_id: str, base_model: str, directory: Path, *, with_optimizer: bool
    ) -> LoraSpec:
        await self._pause()
        checkpoint = read_state(directory)
        check_fits(checkpoint, self._base(base_model))
        if not with_optimizer:
            zeros = np.zeros_like(checkpoint.table)
            checkpoint = replace(checkpoint, first=zeros, second=zeros, step=0)
        self._models[model_id] = replace(checkpoint, base_model=base_model)
        return checkpoint.lora

    async def delete_model(self, model_id: str) -> None:
        self._models.pop(model_id, None)
        self._drop_copy_of(model_id)

    async def forward_backward(self, model_id: str, batch: TrainBatch) -> TrainOutput:
        await self._pause()
        if batch.loss_fn == CUSTOM:
            raise UserError(
                "the fake backend has no torch for a custom loss; run it on the client "
                "(forward_backward_custom with the function itself), or serve with --backend "
                "embedded"
            )
        model = self._model(model_id)
        base = self._base(model.base_model)
        num_tokens = sum(len(datum.tokens) for datum in batch.data)
        output, gradient = await _compute(num_tokens, lambda: train(base, model.table, batch))
        if not batch.forward_only:
            total = gradient if model.gradient is None else model.gradient + gradient
            self._models[model_id] = replace(model, gradient=total)
        return output

    async def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        await self._pause()
        model = self._model(model_id)
        gradient = np.zeros_like(model.table) if model.gradient is None else model.gradient
        norm = float(np.sqrt(np.square(gradient).sum()))
        if not np.isfinite(norm):
            self._models[model_id] = replace(model, gradient=None)
            raise GradientNotFinite
        if params.grad_clip_norm > 0:
            gradient = gradient * min(1.0, params.grad_clip_norm / (norm + 1e-6))
        with np.errstate(all="ignore"):  # what overflows is found, and refused
            stepped = adamw(model, gradient, params)
        kinds = ("weight", stepped.table), ("first moment", stepped.first)
        for kind, numbers in (*kinds, ("second moment", stepped.second)):
            num_bad = int((~(np.abs(numbers) <= FLOAT32_MAX)).sum())
            if num_bad:
                fault = f"{num_bad} of {numbers.size} numbers of the {kind}"
                raise WeightsNotFinite(fault, params)
        self._models[model_id] = replace(stepped, gradient=None)
        return {"unclipped_grad_l2:mean": norm}

    async def save_model(self, model_id: str, directory: Path, *, with_optimizer: bool) -> None:
        await self._pause()
        write_state(self._model(model_id), directory, with_optimizer=with_optimizer)

    async def publish(self, source: WeightsSource) -> str:
        await self._pause()
        match source:
            case FromBase(base_model):
                base = self._base(base_model)
                version = Published(base, base.fresh_table())
            case FromModel(model_id):
                model = self._model(model_id)
                version = Published(self._base(model.base_model), model.table)
            case FromCheckpoint(base_model, directory):
                checkpoint = read_state(directory)
                check_fits(checkpoint, self._base(base_model))
                version = Published(self._base(base_model), checkpoint.table)
        name = f"fake-version-{next(self._numbers)}"
        self._versions[name] = version
        return name

    async def release(self, version: str) -> None:
        self._versions.pop(version, None)

    async def sample(
        self, version: str, request: SampleRequest, on_tokens: OnTokens | None = None
    ) -> SampleOutput:
        published = self._versions.get(version)
        if published is None:
            raise VersionLost(version)
        await self._pause()
        max_tokens = request.params.max_tokens
        num_tokens = len(request.prompt) + request.num_samples * (max_tokens or INLINE_TOKENS)
        if num_tokens <= INLINE_TOKENS:
            return draw_samples(published, request, on_tokens)
        hand_on, cancelled = _threadsafe(on_tokens)
        try:
            return await asyncio.to_thread(draw_samples, published, request, hand_on)
        finally:
            cancelled.set()

    def incarnation(self) -> int | None:
        return 0

    def numerics(self) -> str:
        return f"numpy-{np.__version__}"

    async def copy_state(self, model_id: str) -> int:
        await self._pause()
        model = self._model(model_id)
        self._drop_copy_of(model_id)
        number = next(self._numbers)
        self._copies[number] = (model_id, model)
        return number

    async def write_state(self, copy: int, directory: Path) -> StateCost:
        try:
            _, model = self._copies.pop(copy)
        except KeyError:
            raise StateCopyLost(copy) from None
        await self._pause()
        began = time.monotonic()
        num_bytes = await asyncio.to_thread(write_model, model, directory)
        return StateCost(num_bytes, 0.0, time.monotonic() - began)

    async def drop_copy(self, copy: int) -> None:
        await self._pause()
        self._copies.pop(copy, None)

    async def restore_state(self, model_id: str, base_model: str, directory: Path) -> None:
        await self._pause()
        base = self._base(base_model)
        self._models[model_id] = await asyncio.to_thread(read_model, base, directory)

    async def write_version(self, version: str, directory: Path) -> None:
        published = self._versions.get(version)
        if published is None:
            raise VersionLost(version)
        await self._pause()
        table = published.table
        lora = LoraSpec(rank=1, seed=0)  # sampling does not ask for it
        model = ModelState(published.base.served.name, lora, table, table, table)
        write_state(model, directory, with_optimizer=False)
        await asyncio.to_thread(flushing.flush_folder, directory)

    def stats(self) -> dict[str, float | int | str]:
        return {
            "backend": "fake",
            "num_models": len(self._models),
            "num_versions": len(self._versions),
        }

    async def _pause(self) -> None:
        await asyncio.sleep(self._latency_s)
        if self._stopped:
            raise EngineDied("the fake backend was stopped")

    def _drop_copy_of(self, model_id: str) -> None:
        self._copies = {n: each for n, each in self._copies.items() if each[0] != model_id}

    def _base(self, name: str) -> BaseWeights:
        if name not in self._bases:
            raise BaseModelNotServed(name, tuple(self._bases))
        return self._bases[name]

    def _model(self, model_id: str) -> ModelState:
        if model_id not in self._models:
            raise ModelStateLost(model_id)
        return self._models[model_id]


async def _compute(num_tokens: int, work: Callable[[], Result]) -> Result:
    return work() if num_tokens <= INLINE_TOKENS else await asyncio.to_thread(work)


class _SampleCancelled(Exception):
    """Ends a thread whose caller is gone."""


def _threadsafe(on_tokens: OnTokens | None) -> tuple[OnTokens, threading.Event]:
    """on_tokens for a thread to call, which it ends once the event is set."""
    loop, cancelled = asyncio.get_running_loop(), threading.Event()

    def hand_on(chunk: TokenChunk) -> None:
        if cancelled.is_set():
            raise _SampleCancelled
        if on_tokens is not None:
            loop.call_soon_threadsafe(on_tokens, chunk)

    return hand_on, cancelled


def _served(name: str, path: Path) -> ServedModel:
    """A model of any name; vocabulary and tokenizer from the folder where there is one."""
    config_file = path / "config.json"
    config = json.loads(config_file.read_text()) if config_file.is_file() else {}
    vocab_size = config.get("vocab_size", TINY.vocab_size)
    return replace(
        TINY,
        name=name,
        vocab_size=vocab_size,
        num_parameters=NUM_BUCKETS * vocab_size,
        adapter_sizes=AdapterSizes(unembed=2 * vocab_size),
        tokenizer_path=path if path.is_dir() else None,
    )
