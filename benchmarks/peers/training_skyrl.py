"""SkyRL's Tinker server on the CPU: forward_backward and optim_step through its HTTP API.

It draws its own adapter, on the attention and MLP layers, which at first changes nothing: its first
loss must be the base model's. Its memory is that of all its processes. A step on another adapter
goes before, so that what it compiles for these shapes is there.
"""

import asyncio
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.lib.peer_script import Replies
from benchmarks.lib.peers import Unavailable
from benchmarks.lib.processes import prepare_process
from benchmarks.peers.skyrl_server import SkyrlModel, skyrl_server
from benchmarks.peers.training_common import Job, Record, start

RANK = 32
MICROBATCH_TOKENS = 1024
LOSS_TOLERANCE = 1e-4  # of the loss: other kernels, another order of sums


def session_of(pid: int) -> list[int]:
    """The processes that a server started, itself too."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):  # it has just ended
            if os.getsid(int(path.name)) == pid:
                pids.append(int(path.name))
    return pids


def data_of(batch: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"tokens": ids[:-1], "target_tokens": ids[1:]} for ids in batch]


async def step(model: SkyrlModel, batch: list[list[int]], learning_rate: float) -> float:
    outputs = await model.forward_backward(data_of(batch), "cross_entropy")
    await model.optim_step(learning_rate)
    return sum(sum(output["elementwise_loss"]) for output in outputs)


@torch.inference_mode()
def base_loss(folder: str, batch: list[list[int]]) -> float:
    """Of the model without an adapter, by transformers, summed over all targets."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total = 0.0
    for ids in batch:
        tokens = torch.tensor([ids])
        logits = model(tokens[:, :-1]).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
    return total


def check(job: Job, loss: float) -> None:
    expected = base_loss(job.model, job.batch)
    if abs(loss - expected) > LOSS_TOLERANCE * expected:
        sys.exit(f"its first loss is {loss:.2f}, the base model's {expected:.2f}")


async def measure(job: Job, replies: Replies, url: str, pid: int) -> None:
    warm = await SkyrlModel.create(url, job.model, RANK)
    await step(warm, job.batch, job.learning_rate)
    model = await warm.another(job.model, RANK)
    record, losses = Record(replies, session_of(pid)), []
    for _ in range(job.repeats):
        record.begin()
        losses.append(await step(model, job.batch, job.learning_rate))
        record.end(losses[-1])
    check(job, losses[0])
    record.send()


def main(job: Job, replies: Replies) -> None:
    prepare_process()  # SIGTERM at a limit stops the server, too
    torch.set_num_threads(job.threads)
    longest = max(map(len, job.batch)) - 1
    config = {
        "max_lora_adapters": 3,
        "max_lora_rank": RANK,
        "train_micro_batch_size": max(1, MICROBATCH_TOKENS // longest),
    }
    with tempfile.TemporaryDirectory() as scratch:
        try:
            with skyrl_server(Path(job.peers), Path(job.model), config, Path(scratch)) as running:
                url, server = running
                asyncio.run(measure(job, replies, url, server.pid))
        except Unavailable as reason:
            sys.exit(str(reason))


if __name__ == "__main__":
    main(*start())
