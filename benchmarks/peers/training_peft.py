"""PEFT + transformers: a plain training loop, and variants of it.

plain: right-padded micro-batches of 8 in the given order (the Trainer's default), sdpa. best:
sorted by length, micro-batches of about 1024 tokens, so that little is padding. lean: best, with
gradient checkpointing.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from benchmarks.lib.peer_script import Replies
from benchmarks.peers.training_common import Job, run, start

BEST_TOKENS = 1024


def micro_batches(batch: list[list[int]], variant: str) -> Iterator[list[list[int]]]:
    if variant == "plain":
        yield from (batch[i : i + 8] for i in range(0, len(batch), 8))
        return
    part: list[list[int]] = []
    for ids in sorted(batch, key=len, reverse=True):
        if part and len(part[0]) * (len(part) + 1) > BEST_TOKENS + len(part) + 1:
            yield part
            part = []
        part.append(ids)
    if part:
        yield part


def padded(part: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs and targets (B, L), and which of them are no padding."""
    longest = max(len(ids) for ids in part) - 1
    inputs, targets = (torch.zeros(len(part), longest, dtype=torch.int64) for _ in range(2))
    real = torch.zeros(len(part), longest, dtype=torch.int64)
    for i, ids in enumerate(part):
        num = len(ids) - 1
        inputs[i, :num], targets[i, :num] = torch.tensor(ids[:-1]), torch.tensor(ids[1:])
        real[i, :num] = 1
    return inputs, targets, real


def loss_of(model: torch.nn.Module, part: list[list[int]]) -> torch.Tensor:
    """The sum over all targets, as the Tinker API defines cross_entropy with weights of 1."""
    inputs, targets, real = padded(part)
    whole = bool(real.all())
    logits = model(input_ids=inputs, attention_mask=None if whole else real, use_cache=False).logits
    labels = targets.masked_fill(real == 0, -100)
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


def main(job: Job, replies: Replies) -> None:
    torch.set_num_threads(job.threads)
    base = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=getattr(torch, job.dtype), attn_implementation="sdpa"
    )
    model = PeftModel.from_pretrained(base, job.adapter, is_trainable=True)
    if job.variant == "lean":
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=job.learning_rate, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0
    )

    def forward_backward(batch: list[list[int]]) -> float:
        total = 0.0
        for part in micro_batches(batch, job.variant):
            loss = loss_of(model, part)
            loss.backward()
            total += float(loss.detach())
        return total

    def step(batch: list[list[int]]) -> float:
        total = forward_backward(batch)
        optimizer.step()
        optimizer.zero_grad()
        return total

    forward_backward(job.warm_up)
    optimizer.zero_grad()
    run(job, replies, step, lambda path: save(model, path))


def save(model: PeftModel, path: Path) -> None:
    model.save_pretrained(str(path))


if __name__ == "__main__":
    main(*start())
