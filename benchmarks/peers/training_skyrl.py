"""SkyRL's Tinker server on the CPU: forward_backward and optim_step through its HTTP API.

It draws its own adapter, on the attention and MLP layers, which at first changes nothing: its first
loss must be the base model's. Its memory is that of all its processes. A step on another adapter
goes before, so that what it compiles for these shapes is there.
"""

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers.sampling_common import Unavailable
from peers.skyrl_server import SkyrlModel, skyrl_server
from training_common import Job, Record, read_job
from transformers import AutoModelForCausalLM

RANK = 32
MICROBATCH_TOKENS = 1024
LOSS_TOLERANCE = 1e-4  # of the loss: other kernels, another order of sums


def session_of(pid: int) -> list[int]:
    """The processes that a server started, itself too."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(path.name)) == pid:
                found.append(int(path.name))
        except ProcessLookupError:
            continue
    return found


def data_of(batch: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"tokens": ids[:-1], "target_tokens": ids[1:]} for ids in batch]


async def step(model: SkyrlModel, batch: list[list[int]], learning_rate: float) -> float:
    told = await model.forward_backward(data_of(batch), "cross_entropy")
    await model.optim_step(learning_rate)
    return sum(sum(one["elementwise_loss"]) for one in told)


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
    wanted = base_loss(job.model, job.batch)
    if abs(loss - wanted) > LOSS_TOLERANCE * wanted:
        sys.exit(f"its first loss is {loss:.2f}, the base model's {wanted:.2f}")


async def measure(job: Job, url: str, pid: int) -> None:
    warm = await SkyrlModel.create(url, job.model, RANK)
    await step(warm, job.batch, job.learning_rate)
    model = await warm.another(job.model, RANK)
    record, losses = Record(session_of(pid)), []
    for _ in range(job.repeats):
        record.begin()
        losses.append(await step(model, job.batch, job.learning_rate))
        record.end(losses[-1])
    check(job, losses[0])
    record.tell()


def main(job: Job) -> None:
    # Whoever stops this process at a limit stops the server with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("it was stopped"))
    torch.set_num_threads(job.threads)
    longest = max(map(len, job.batch)) - 1
    config = {
        "max_lora_adapters": 3,
        "max_lora_rank": RANK,
        "train_micro_batch_size": max(1, MICROBATCH_TOKENS // longest),
    }
    with tempfile.TemporaryDirectory() as scratch:
        try:
            with skyrl_server(Path(job.peers), Path(job.model), config, Path(scratch)) as found:
                url, server = found
                asyncio.run(measure(job, url, server.pid))
        except Unavailable as reason:
            sys.exit(str(reason))


if __name__ == "__main__":
    main(read_job())
