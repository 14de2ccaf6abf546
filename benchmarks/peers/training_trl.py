"""TRL's SFTTrainer with PEFT, its environment's own process.

Its settings: sequences packed by best fit (which makes it free of padding), micro-batches of about
1024 tokens, and its own loss in chunks, which never holds all logits. That loss reads the
unembedding's weights past an adapter on it, so the adapter is on the other layers only.
"""

import math
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer, pack_dataset

from benchmarks.lib.peer_script import Replies
from benchmarks.peers.training_common import Job, Record, start
from benchmarks.peers.trl_settings import CPU_TRAINER

MICROBATCH_TOKENS = 1024


class SummedLoss(SFTTrainer):
    """The loss of a step, summed over its tokens; what is logged is a mean, and rounded."""

    total = 0.0

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = result[0] if return_outputs else result
        self.total += float(loss.detach()) * float(num_items_in_batch)
        return result


class Clock(TrainerCallback):
    """Each optimizer step, with the forwards and backwards that lead to it."""

    def __init__(self, trainer: SummedLoss, record: Record):
        self._trainer, self._record = trainer, record

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._trainer.total = 0.0
        self._record.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._record.end(self._trainer.total)


def settings(job: Job, data: Dataset) -> SFTConfig:
    """One epoch is one step: every micro-batch of the packed data adds to its gradient."""
    longest = max(map(len, job.batch))
    rows = len(pack_dataset(data, longest, "bfd"))
    at_once = max(1, MICROBATCH_TOKENS // longest)
    return SFTConfig(
        output_dir=job.save_to,
        max_steps=job.repeats,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=math.ceil(rows / at_once),
        packing=True,
        max_length=longest,
        learning_rate=job.learning_rate,
        adam_beta2=0.95,
        adam_epsilon=1e-12,
        weight_decay=0.0,
        max_grad_norm=0.0,
        **CPU_TRAINER,
    )


def main(job: Job, replies: Replies) -> None:
    torch.set_num_threads(job.threads)
    base = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=torch.float32, attn_implementation="sdpa"
    )
    data = Dataset.from_dict({"input_ids": job.batch, "labels": job.batch})
    model = PeftModel.from_pretrained(base, job.adapter, is_trainable=True)
    trainer = SummedLoss(
        model=model,
        args=settings(job, data),
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(job.model),
    )
    warm_up = torch.tensor(job.warm_up)
    model(input_ids=warm_up, labels=warm_up, fused_lm_head=True).loss.backward()
    model.zero_grad()
    record = Record(replies)
    trainer.add_callback(Clock(trainer, record))
    trainer.train()
    model.save_pretrained(job.save_to)
    record.send()


if __name__ == "__main__":
    main(*start())
