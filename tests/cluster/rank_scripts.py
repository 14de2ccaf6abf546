"""The same operations on Megatron's ranks and on the embedded backend.

A script is a list of operations; each gives a result, or the error it raised. Tensors are compared
through checkpoints, which both backends write in one format. A step with learning rate 0 and beta1
0 turns the accumulated gradient into the first moment, so that a checkpoint shows it.
"""

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tests.embedded.tiny import TinyStore, train
from tinkercloud.cluster.base_models import CPU_PREPARE
from tinkercloud.cluster.training.rank_types import RankSettings, merge_outputs
from tinkercloud.core.types import AdamParams, Datum, LoraSpec, TrainBatch, TrainOutput
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.process.version_cache import VersionCache
from tinkercloud.embedded.training.micro_batches import Limits
from tinkercloud.errors import TinkercloudError
from tinkercloud.planning.plan import Plan

Op = tuple[Any, ...]
"""("create", id, LoraSpec), ("fb" | "forward", id, TrainBatch), ("step", id, AdamParams),
("save" | "load", id, folder, with_optimizer), ("delete", id), ("offload",), ("onload",),
("export", id, folder, form), ("checksum", id), ("stats",), ("base",): a hash of the network's own
parameters, ("buckets", id): the merged weights, ("poison", id): a gradient that is not finite,
("sizes",): bytes that the network's parameters hold."""

SHOW_GRADIENT = AdamParams(learning_rate=0.0, beta1=0.0, beta2=0.0, eps=1.0)


@dataclass(frozen=True)
class Failed:
    kind: str
    text: str


# ---- data


def data_for(
    loss: str, lengths: Sequence[int], seed: int, targets: int | None = None
) -> TrainBatch:
    """A batch of datums of these lengths; targets: K of (N, K) target tokens."""
    rng = np.random.default_rng(seed)
    return TrainBatch(
        tuple(_datum(loss, length, rng, targets) for length in lengths), loss, _config(loss)
    )


def _datum(loss: str, length: int, rng: Any, targets: int | None) -> Datum:
    tokens = rng.integers(0, 259, length).astype(np.int32)
    shape = (length,) if targets is None else (length, targets)
    inputs: dict[str, Any] = {"target_tokens": rng.integers(0, 259, shape)}
    if loss == "cross_entropy":
        inputs["weights"] = rng.normal(size=shape).astype(np.float32)
        inputs["weights"][: length // 3] = 0
    else:
        inputs["logprobs"] = (rng.normal(size=length) * 0.3 - 5.6).astype(np.float32)
        inputs["advantages"] = rng.normal(size=length).astype(np.float32)
        inputs["advantages"][: length // 3] = 0
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = (rng.random(length) > 0.3).astype(np.float32)
    if loss == "stable_reinforce":
        inputs["sampled_mask"] = (np.arange(length) >= length // 4).astype(np.float32)
    return Datum(tokens, inputs)


def _config(loss: str) -> dict[str, float]:
    from tinkercloud.losses import LOSSES

    return dict(LOSSES[loss].defaults)


# ---- Megatron


@dataclass(frozen=True)
class Job:
    """A script on the ranks of a plan. resident: adapters in device memory at one time."""

    plan: Plan
    folder: Path
    script: list[Op]
    resident: int = 4


def on_rank(
    rank: int, world: int, init_method: str, rendezvous: Path, jobs: list[Job]
) -> list[Any]:
    """One job after the other in one process: starting it costs more than most scripts."""
    from tests.cluster.cpu import uneven
    from tinkercloud.cluster.cpu.ranks import prepare

    prepare()
    uneven.install()
    return [_do(job, rank, world, f"file://{rendezvous}/{i}") for i, job in enumerate(jobs)]


def _do(job: Job, rank: int, world: int, init_method: str) -> list[Any]:
    from megatron.core import parallel_state

    from tinkercloud.cluster.training.train_rank import MegatronRank

    settings = RankSettings(
        rank, world, init_method, job.plan, "tiny", job.folder, CPU_PREPARE,
        timeout_s=120.0, resident_adapters=job.resident,
    )  # fmt: skip
    own = MegatronRank(settings)
    results = [_tried(_rank_op, own, op) for op in job.script]
    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return results


def _tried(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except TinkercloudError as error:
        return Failed(type(error).__name__, str(error))


def _rank_op(own: Any, op: Op) -> Any:  # noqa: C901 - a table
    match op:
        case ("create", name, spec):
            return own.create(name, spec)
        case ("fb", name, batch):
            return own.forward_backward_only(name, batch)
        case ("forward", name, batch):
            return own.forward_only(name, batch)
        case ("step", name, params):
            return own.apply_optimizer_step(name, params)
        case ("save", name, folder, with_optimizer):
            folder.mkdir(exist_ok=True, parents=True)
            return own.save(name, folder, with_optimizer=with_optimizer)
        case ("load", name, folder, with_optimizer):
            return own.load(name, folder, with_optimizer=with_optimizer)
        case ("export", name, folder, form):
            folder.mkdir(exist_ok=True, parents=True)
            return own.export(name, folder, form=form)
        case ("buckets", name):
            return {n: t.clone() for b in own.weight_buckets(name, 10_000) for n, t in b}
        case ("base",):
            return _hash(own._network)
        case ("poison", name):
            for gradient in own._models.get(name).optimizer.gradient_tensors():
                gradient[:1] = float("nan")
            return None
        case ("sizes",):
            return sum(p.untyped_storage().nbytes() for p in own._network.parameters())
        case (simple, *args):
            return getattr(own, simple)(*args)


def _hash(network: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, parameter in network.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().clone().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def play(jobs: dict[str, Job], limit_s: float = 600.0) -> dict[str, list[Any]]:
    """Jobs of equally many ranks: merged outputs, and what all ranks must agree on, once."""
    from tests.cluster.cpu import spawn

    (world,) = {job.plan.layout.world for job in jobs.values()}
    with tempfile.TemporaryDirectory() as rendezvous:
        by_rank = spawn.run(on_rank, world, Path(rendezvous), list(jobs.values()), limit_s=limit_s)
    return {
        name: [_one([own[k][i] for own in by_rank], op) for i, op in enumerate(job.script)]
        for k, (name, job) in enumerate(jobs.items())
    }


def _one(results: list[Any], op: Op) -> Any:
    if any(isinstance(r, Failed) for r in results):
        assert all(r == results[0] for r in results), f"ranks disagree: {results}"
        return results[0]
    if op[0] in ("fb", "forward"):
        return merge_outputs(results)
    if op[0] in ("step", "checksum"):
        assert all(r == results[0] for r in results), f"ranks disagree: {results}"
    if op[0] == "buckets":
        for other in results[1:]:
            assert all(torch.equal(t, other[n]) for n, t in results[0].items())
    return results if op[0] in ("stats", "offload", "onload", "base", "sizes") else results[0]


# ---- the embedded backend


class Embedded:
    """Plays the operations that both know."""

    def __init__(self, folder: Path, scratch: Path, tokens: int = 1024):
        scratch.mkdir(exist_ok=True, parents=True)

        def load(name: str) -> BaseModel:
            return BaseModel.load(name, folder, None, torch.float32, torch.device("cpu"))

        self._store = TinyStore(load, VersionCache(scratch, 2**20), Limits(tokens))

    def play(self, script: list[Op]) -> list[Any]:
        return [_tried(self._op, op) for op in script]

    def _op(self, op: Op) -> Any:
        store = self._store
        match op:
            case ("create", name, spec):
                return store.create_model(name, "tiny", spec)
            case ("fb" | "forward", name, batch):
                return train(
                    store, name, list(batch.data), batch.loss_fn, forward_only=op[0] == "forward",
                    loss_fn_config=batch.loss_fn_config,
                )  # fmt: skip
            case ("step", name, params):
                return store.optim_step(name, params)
            case ("save", name, folder, with_optimizer):
                folder.mkdir(exist_ok=True, parents=True)
                return store.save_model(name, folder, with_optimizer)
            case ("load", name, folder, with_optimizer):
                return store.load_model(name, "tiny", folder, with_optimizer)
        raise AssertionError(f"{op[0]} is not for the embedded backend")


# ---- comparisons


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    assert found, folder
    return found


def assert_close(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], share: float = 3e-5
) -> None:
    """Equal up to the order of float32 sums: that share of the tensor's largest entry. (Adam
    divides small gradients by their own size, so that their last bits weigh more in weights.)"""
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        limit = share * float(theirs[name].abs().max())
        torch.testing.assert_close(
            tensor, theirs[name], rtol=0, atol=limit, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_same_output(ours: TrainOutput, theirs: TrainOutput, rtol: float = 1e-5) -> None:
    assert len(ours.outputs) == len(theirs.outputs)
    for a, b in zip(ours.outputs, theirs.outputs, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            assert value.dtype == np.float32
            assert value.shape == b[name].shape
            np.testing.assert_allclose(value, b[name], rtol=rtol, atol=2 * rtol)
    total = sum(float(np.abs(o["logprobs"]).sum()) for o in theirs.outputs)
    loss, expected = ours.metrics["loss:sum"], theirs.metrics["loss:sum"]
    assert abs(loss - expected) <= rtol * max(abs(expected), total)


def lora(rank: int = 4, seed: int = 3, **flags: bool) -> LoraSpec:
    return LoraSpec(rank=rank, seed=seed, **flags)
