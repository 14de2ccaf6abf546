"""Our embedded trainer, as its engine process runs it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.lib.peer_script import Replies
from benchmarks.peers.training_common import Job, run, start
from tinkercloud.core.types import AdamParams, Datum, LoraSpec, TrainBatch
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.device import freeze_garbage_collector
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.process.version_cache import VersionCache
from tinkercloud.embedded.training.micro_batches import Limits
from tinkercloud.embedded.training.queue import train_alone
from tinkercloud.weights.adapters import load_adapter, save_adapter

MICROBATCH_TOKENS = 1024


def data_of(batch: list[list[int]]) -> Iterator[Datum]:
    for ids in batch:
        tokens = np.array(ids)
        inputs = {
            "target_tokens": tokens[1:].astype(np.int64),
            "weights": np.ones(len(ids) - 1, np.float32),
        }
        yield Datum(tokens[:-1].astype(np.int32), inputs)


def main(job: Job, replies: Replies) -> None:
    torch.set_num_threads(job.threads)
    device = torch.device("cpu")

    def load(name: str) -> BaseModel:
        return BaseModel.load(name, Path(job.model), None, getattr(torch, job.dtype), device)

    versions = VersionCache(Path(job.save_to) / "versions", 2**30)
    store, limits = ModelStore(load, versions), Limits(MICROBATCH_TOKENS)
    spec = LoraSpec(rank=32, seed=0, train_unembed=job.variant != "no unembedding")
    store.create_model("m", "base", spec)
    model = store.model("m")
    assert model.adapter is not None
    adapter = load_adapter(Path(job.adapter), spec, model.base.config.linear_shapes(), device)
    with torch.no_grad():
        for name, (a, b) in adapter.items():
            model.adapter[name][0].copy_(a)
            model.adapter[name][1].copy_(b)
    del adapter
    hyper = AdamParams(job.learning_rate)

    def forward_backward(batch: list[list[int]]) -> float:
        work = TrainBatch(tuple(data_of(batch)), "cross_entropy")
        return float(train_alone(model, work, limits).metrics["loss:sum"])

    def step(batch: list[list[int]]) -> float:
        total = forward_backward(batch)
        store.optim_step("m", hyper)
        return total

    def save(path: Path) -> None:
        assert model.adapter is not None
        save_adapter(model.adapter, spec, "base", path)

    forward_backward(job.warm_up)
    model.grads = {}
    freeze_garbage_collector()
    run(job, replies, step, save)


if __name__ == "__main__":
    main(*start())
