"""What the GPU tests do, as functions of the machine: `prepare` None is a GPU, else a CPU's hook.

tests/cluster runs the same bodies on a CPU, so that nothing here is ever run for the first time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tinkercloud.core.types import (
    AdamParams,
    Datum,
    LoraSpec,
    SampleOutput,
    SampleRequest,
    TrainBatch,
)
from tinkercloud.planning.plan import Plan

SPEC = LoraSpec(rank=4, seed=3)
STEP = AdamParams(learning_rate=1e-2, eps=1e-3)


def batch() -> TrainBatch:
    generator = np.random.default_rng(0)
    data = []
    for length in (5, 17, 30):
        tokens = generator.integers(3, 250, length + 1).astype(np.int32)
        inputs = {
            "target_tokens": tokens[1:].astype(np.int64),
            "weights": np.ones(length, np.float32),
        }
        data.append(Datum(tokens[:-1], inputs))
    return TrainBatch(tuple(data), "cross_entropy")


@dataclass(frozen=True)
class Trained:
    """Losses before each of three steps, log-probabilities after them, bytes that an offload freed
    (as the rank says, and as the device says), and losses of a fourth step after the onload."""

    losses: list[float]
    logprobs: list[np.ndarray]
    freed_bytes: int
    device_freed_bytes: int
    later_loss: float
    checksums: tuple[str, str]


def trained(  # noqa: PLR0913 - spawn's signature
    rank: int, world_size: int, init_method: str, folder: Path, plan: Plan, prepare: str | None
) -> Trained:
    """One rank's life: three LoRA steps, away to the host and back, one step more."""
    import torch

    from tinkercloud.cluster.training.rank_types import RankSettings
    from tinkercloud.cluster.training.train_rank import MegatronRank

    settings = RankSettings(
        rank=rank,
        world_size=world_size,
        init_method=init_method,
        plan=plan,
        base_model="tiny",
        folder=folder,
        prepare=prepare,
        timeout_s=120.0,
    )
    on_gpu = prepare is None
    own = MegatronRank(settings)
    own.create("m", SPEC)
    work = batch()
    losses = [_step(own, work) for _ in range(3)]
    output = own.forward_only("m", work)
    assert output is not None
    before = own.checksum("m")
    held = torch.cuda.memory_allocated() if on_gpu else 0
    freed = own.offload()
    device_freed = held - torch.cuda.memory_allocated() if on_gpu else 0
    own.onload()
    after = own.checksum("m")
    logprobs = [each["logprobs"] for each in output.outputs]
    return Trained(losses, logprobs, freed, device_freed, _step(own, work), (before, after))


def _step(own: Any, work: TrainBatch) -> float:
    output = own.forward_backward_only("m", work)
    own.apply_optimizer_step("m", STEP)
    return float(output.metrics["loss:sum"])


def embedded(folder: Path, device: str) -> tuple[list[float], list[np.ndarray], float]:
    """The same on the embedded backend: losses, log-probabilities, the later loss."""
    from dataclasses import replace

    import torch

    from tinkercloud.embedded.model.base_model import BaseModel
    from tinkercloud.embedded.training.micro_batches import Limits
    from tinkercloud.embedded.training.queue import TrainingQueue
    from tinkercloud.embedded.training.trainable_model import TrainableModel
    from tinkercloud.weights.adapters import fresh_adapter

    place = torch.device(device)
    base = BaseModel.load("tiny", folder, None, torch.float32, place)
    adapter = fresh_adapter(SPEC, base.config.linear_shapes(), place)
    model = TrainableModel("m", base, SPEC, adapter, None)

    def run(work: TrainBatch) -> Any:
        queue = TrainingQueue(Limits(4096))
        queue.add(0, model, work)
        (call,) = queue.step(math.inf)
        assert call.error is None, call.error
        return call.output

    def step() -> float:
        output = run(batch())
        model.optim_step(STEP)
        return float(output.metrics["loss:sum"])

    losses = [step() for _ in range(3)]
    output = run(replace(batch(), forward_only=True))
    return losses, [each["logprobs"] for each in output.outputs], step()


def compare(found: Trained, reference: tuple[list[float], list[np.ndarray], float]) -> None:
    losses, logprobs, later = reference
    np.testing.assert_allclose(found.losses, losses, rtol=1e-4)
    for ours, theirs in zip(found.logprobs, logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-3)
    np.testing.assert_allclose(found.later_loss, later, rtol=1e-3)
    assert found.losses[2] < found.losses[0]
    assert found.checksums[0] == found.checksums[1], "offload and onload change no bit"
    assert found.freed_bytes > 0


@dataclass(frozen=True)
class Rested:
    """What engines answered before they gave their memory away and after they had it back, and the
    bytes freed in between: as the engines say, and as the device says."""

    before: SampleOutput
    after: SampleOutput
    freed_bytes: int
    device_freed_bytes: int


async def rested(manager: Any, request: SampleRequest, free_bytes: Callable[[], int]) -> Rested:
    """manager: a started RolloutManager. free_bytes: of the device, now."""
    before = await manager.generate(None, request)
    free = free_bytes()
    freed = await manager.offload()
    device_freed = free_bytes() - free
    await manager.onload()
    after = await manager.generate(None, request)
    return Rested(before, after, freed, device_freed)


def compare_rested(found: Rested) -> None:
    for one, other in zip(found.before.sequences, found.after.sequences, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-3)
