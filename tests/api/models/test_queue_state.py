"""What a client is told while its model waits for GPUs (wire specification 4.2)."""

import asyncio
from pathlib import Path

from tests.api.harness import serving
from tests.waiting import async_wait_for
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.config import Config
from tinkercloud.core.types import LoraSpec, OnTokens, SampleOutput, SampleRequest

REASON = "waiting until 8 GPUs are free"


class FullBackend(FakeBackend):
    """Makes models only once there is room."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.room = asyncio.Event()
        self.waiting: set[str] = set()

    async def create_model(self, model_id: str, base_model: str, lora: LoraSpec) -> None:
        self.waiting.add(model_id)
        await self.room.wait()
        self.waiting.discard(model_id)
        await super().create_model(model_id, base_model, lora)

    async def sample(
        self, version: str, request: SampleRequest, on_tokens: OnTokens | None = None
    ) -> SampleOutput:
        self.waiting.add(version)
        await self.room.wait()
        self.waiting.discard(version)
        return await super().sample(version, request, on_tokens)

    def queue_state(self, subject: str) -> str | None:
        return REASON if subject in self.waiting else None


async def test_a_model_that_waits_for_capacity_says_so_until_it_has_it(tmp_path: Path):
    backend = FullBackend(Config(backend="fake"))
    async with serving(tmp_path, backend=backend, hold_s=0.05) as api:
        session_id = await api.session()
        accepted = await api.ok(
            "create_model", session_id=session_id, model_seq_id=0, base_model="fake/tiny"
        )
        await async_wait_for("it waits for room", lambda: backend.waiting)
        pending = await api.retrieve(accepted["request_id"])
        assert pending.status_code == 408
        assert pending.json() == {
            "type": "try_again",
            "request_id": accepted["request_id"],
            "queue_state": "paused_capacity",
            "queue_state_reason": REASON,
        }
        backend.room.set()
        assert (await api.result(accepted))["model_id"] == accepted["model_id"]


async def test_a_sample_that_waits_for_capacity_says_so_until_it_has_it(tmp_path: Path):
    backend = FullBackend(Config(backend="fake"))
    async with serving(tmp_path, backend=backend, hold_s=0.05) as api:
        accepted = await api.ok(
            "asample",
            base_model="fake/tiny",
            num_samples=1,
            prompt={"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            sampling_params={"max_tokens": 2, "seed": 1},
        )
        await async_wait_for("it waits for room", lambda: backend.waiting)
        pending = await api.retrieve(accepted["request_id"])
        assert pending.status_code == 408
        assert pending.json()["queue_state"] == "paused_capacity"
        assert pending.json()["queue_state_reason"] == REASON
        backend.room.set()
        assert len((await api.result(accepted)).sequences) == 1
