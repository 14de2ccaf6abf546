"""The fake backend behind a boundary of processes: each call is a message there and an answer back,
and the engine may end between any two of them, with all that it holds in memory."""

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from tests.simulation import tokenizer
from tests.simulation.loop import Process, SimulatedLoop, in_process
from tests.simulation.schedule import BASES, VOCAB_SIZE, EngineFate
from tinkercloud.backends.base import Backend, MakeRoom
from tinkercloud.backends.fake import TINY, FakeBackend
from tinkercloud.backends.fake_model import NUM_BUCKETS, BaseWeights
from tinkercloud.config import Config
from tinkercloud.core.types import (
    AdamParams,
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
from tinkercloud.errors import EngineDied, MemoryShort, TinkercloudError

FREEING = ("delete_model", "drop_copy", "release")
WITH_ROOM = ("create_model", "load_model", "forward_backward", "publish", "restore_state")
"""As of the embedded engine: where memory is short for these, others are asked to make room."""
OUT_OF_MEMORY = "the engine ran out of memory for this operation"


def served_models() -> tuple[ServedModel, ...]:
    return tuple(
        replace(
            TINY,
            name=name,
            vocab_size=VOCAB_SIZE + 8 * number,
            num_parameters=NUM_BUCKETS * (VOCAB_SIZE + 8 * number),
            tokenizer_path=tokenizer.folder(),
        )
        for number, name in enumerate(BASES)
    )


_WEIGHTS = {served.name: BaseWeights.of(served) for served in served_models()}


class SmallFakeBackend(FakeBackend):
    """The fake backend with models of a few tokens."""

    def __init__(self, incarnation: int = 0) -> None:
        super().__init__(Config(backend="fake"))
        self._bases = dict(_WEIGHTS)
        self._numbers = count(incarnation * 10**6)  # as engines do, it repeats no name of a version


class SimulatedEngine(Backend):
    """fate: of each message by its number. on_message: called as each is sent and answered.
    operation_s: how long one takes, on average. other_numerics_from: engines from that one on say
    that they compute otherwise; None: none does.

    `inner` is what the engine process has in memory; it is lost with it.
    """

    def __init__(
        self,
        loop: SimulatedLoop,
        choices: random.Random,
        fate: Callable[[int], EngineFate],
        on_message: Callable[[str, str], None],
        operation_s: float,
    ):
        self._loop = loop
        self._choices = choices
        self._fate = fate
        self._on_message = on_message
        self._number = 0
        self._server: Process | None = None
        self._up = asyncio.Event()
        self._pending: dict[asyncio.Future[Any], None] = {}
        self._incarnation = -1
        self._operation_s = operation_s
        self._make_room: MakeRoom = _nothing_to_free
        self.other_numerics_from: int | None = None
        self.process = Process("engine")
        self.inner = SmallFakeBackend()

    # ---- its life

    async def start(self) -> tuple[ServedModel, ...]:
        await asyncio.sleep(self._choices.expovariate(10.0))
        self._begin()
        return await self.inner.start()

    async def stop(self) -> None:
        self.die(for_s=float("inf"))

    def serve(self, server: Process) -> None:
        """Of a new server process: a fresh engine."""
        self.end()
        self._server = server
        self._up = asyncio.Event()
        self._pending = {}

    def _begin(self) -> None:
        self._incarnation += 1
        self.process = Process("engine")
        self.inner = SmallFakeBackend(self._incarnation)
        self._up.set()

    def calm(self) -> None:
        """No faults from now on."""
        self._fate = lambda number: "fine"

    def end(self) -> None:
        """With its server, or before another begins."""
        self.process.alive = False
        self._up.clear()

    def die(self, for_s: float) -> None:
        """Alone: its server sees that, and has a new one after that time."""
        was_up = self.is_up
        self.end()
        if not was_up or self._server is None or not self._server.alive:
            return  # where it was down already, the next one is on its way
        pending, self._pending = self._pending, {}
        in_process(self._server, self._loop.call_later, 0.001, _fail, list(pending))
        if for_s != float("inf"):
            in_process(self._server, self._loop.call_later, for_s, self._begin)

    @property
    def is_up(self) -> bool:
        return self._up.is_set()

    async def answered(self) -> None:
        """Until all that it is asked now has its answer."""
        if self._pending:
            await asyncio.wait(list(self._pending))

    # ---- messages

    async def _call(self, name: str, *args: Any, **options: Any) -> Any:
        while True:
            try:
                return await self._call_once(name, *args, **options)
            except MemoryShort:
                if not await self._make_room():
                    raise

    async def _call_once(self, name: str, *args: Any, **options: Any) -> Any:
        while not self._up.is_set():
            await self._up.wait()
        self._number += 1
        fate = self._fate(self._number)
        future = self._loop.create_future()
        self._pending[future] = None
        self._on_message("engine", f"{name}: sent")
        work = (future, fate, name, args, options)
        in_process(self.process, self._loop.call_later, self._delay_s(fate), self._take, *work)
        try:
            return await future
        finally:
            self._pending.pop(future, None)

    def _delay_s(self, fate: EngineFate) -> float:
        mean_s = 5.0 if fate == "slow" else self._operation_s
        return self._choices.expovariate(1 / mean_s)

    def _take(self, future: Any, fate: EngineFate, name: str, args: Any, options: Any) -> None:
        if future.cancelled() and name == "sample":
            return
        self._on_message("engine", f"{name}: before its effect")
        if not self.process.alive:
            return
        if fate == "die before":
            self.die(self._choices.choice((0.0, 0.5, 5.0)))
        elif fate == "out of memory" and name not in FREEING:
            if name == "write_state":
                self.inner._copies.pop(args[0], None)  # by contract it is gone where this fails
            self._answer(future, name, None, TinkercloudError(OUT_OF_MEMORY))
        elif fate == "memory short" and name in WITH_ROOM:
            self._answer(future, name, None, MemoryShort("this", 2**20, 0))
        else:
            self._loop.create_task(self._serve(future, fate, name, args, options))

    async def _serve(
        self, future: Any, fate: EngineFate, name: str, args: Any, options: Any
    ) -> None:
        result, failure = None, None
        on_tokens, chunks = options.pop("on_tokens", None), list[TokenChunk]()
        if on_tokens is not None:
            options["on_tokens"] = chunks.append
        try:
            result = await getattr(self.inner, name)(*args, **options)
        except Exception as error:  # noqa: BLE001 - whatever it is, it travels back
            failure = error
        self._on_message("engine", f"{name}: after its effect")
        if not self.process.alive:
            return
        if fate == "die after":
            self.die(self._choices.choice((0.0, 0.5, 5.0)))
            return
        delay_s = 0.0
        for chunk in chunks:
            delay_s += self._choices.expovariate(500.0)
            self._loop.call_later(delay_s, self._stream, future, on_tokens, chunk)
        outcome = (future, name, result, failure)
        delay_s += self._choices.expovariate(500.0)
        self._loop.call_later(delay_s, self._answer, *outcome)

    def _stream(self, future: Any, on_tokens: OnTokens, chunk: TokenChunk) -> None:
        if not future.done():
            on_tokens(chunk)

    def _answer(self, future: Any, name: str, result: Any, failure: Exception | None) -> None:
        if future.done():
            return
        if failure is None:
            future.set_result(result)
        else:
            future.set_exception(failure)
        self._on_message("answered", f"{name}: answered")

    # ---- the contract

    def use_for_room(self, make_room: MakeRoom) -> None:
        self._make_room = make_room

    async def create_model(self, model_id: str, base_model: str, lora: LoraSpec) -> None:
        await self._call("create_model", model_id, base_model, lora)

    async def load_model(
        self, model_id: str, base_model: str, directory: Path, *, with_optimizer: bool
    ) -> LoraSpec:
        return await self._call(
            "load_model", model_id, base_model, directory, with_optimizer=with_optimizer
        )

    async def delete_model(self, model_id: str) -> None:
        await self._call("delete_model", model_id)

    async def forward_backward(self, model_id: str, batch: TrainBatch) -> TrainOutput:
        return await self._call("forward_backward", model_id, batch)

    async def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        return await self._call("optim_step", model_id, params)

    async def save_model(self, model_id: str, directory: Path, *, with_optimizer: bool) -> None:
        await self._call("save_model", model_id, directory, with_optimizer=with_optimizer)

    async def publish(self, source: WeightsSource) -> str:
        return await self._call("publish", source)

    async def release(self, version: str) -> None:
        await self._call("release", version)

    async def sample(
        self, version: str, request: SampleRequest, on_tokens: OnTokens | None = None
    ) -> SampleOutput:
        return await self._call("sample", version, request, on_tokens=on_tokens)

    async def train_draft(self, base_model: str) -> None:
        await self._call("train_draft", base_model)

    def incarnation(self) -> int | None:
        return self._incarnation

    def numerics(self) -> str:
        is_other = self._incarnation >= (self.other_numerics_from or math.inf)
        return self.inner.numerics() + ", otherwise" * is_other

    async def copy_state(self, model_id: str) -> int:
        return await self._call("copy_state", model_id)

    async def write_state(self, copy: int, directory: Path) -> StateCost:
        return await self._call("write_state", copy, directory)

    async def drop_copy(self, copy: int) -> None:
        await self._call("drop_copy", copy)

    async def write_version(self, version: str, directory: Path) -> None:
        await self._call("write_version", version, directory)

    async def restore_state(self, model_id: str, base_model: str, directory: Path) -> None:
        await self._call("restore_state", model_id, base_model, directory)

    def stats(self) -> dict[str, float | int | str]:
        return {"backend": "simulated"}


async def _nothing_to_free() -> bool:
    return False


def _fail(pending: list[Any]) -> None:
    for future in pending:
        if not future.done():
            future.set_exception(EngineDied("the engine process ended while it held this request"))
