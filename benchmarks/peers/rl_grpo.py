"""TRL's GRPOTrainer with PEFT, generating by transformers: the process of `rl_trl`, in the peer's
environment. It replies when a phase begins, when it ends, and at the end of a step.

Its loss reads past an adapter on the unembedding, so the adapter is on the other layers only.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.lib.peer_script import Replies, read_job
from benchmarks.peers.rl_common import LEARNING_RATE, MICROBATCH, RANK, Scale, vowels
from benchmarks.peers.trl_settings import CPU_TRAINER

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class TimedTrainer(GRPOTrainer):
    """Replies when its parts begin, and how long they took; all else of a step is training.

    parts_s: seconds of this step that were not training."""

    replies: Replies
    parts_s = 0.0

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with self._part("sample"):
            return super()._generate(*args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self._part("reward"):
            return super()._calculate_rewards(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if not math.isfinite(float(loss.detach())):
            self.replies.send(fault="the loss is not finite")
        return loss

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        self.replies.send(begins=name)
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.parts_s += seconds
        self.replies.send(phases={name: seconds}, begins="forward_backward")


class Clock(TrainerCallback):
    """The whole of each step, and its update."""

    def __init__(self, trainer: TimedTrainer):
        self._trainer = trainer
        self._start = self._update_start = self._update_s = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start, self._trainer.parts_s = time.perf_counter(), 0.0

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._update_start = time.perf_counter()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._update_s = time.perf_counter() - self._update_start

    def on_step_end(self, *_: Any, **__: Any) -> None:
        whole_s = time.perf_counter() - self._start
        training_s = whole_s - self._trainer.parts_s - self._update_s
        phases = {"forward_backward": training_s, "optim_step": self._update_s}
        self._trainer.replies.send(phases=phases, step=True)


def settings(scale: Scale, scratch: str) -> GRPOConfig:
    micro_batch = math.gcd(MICROBATCH, scale.sequences)
    return GRPOConfig(
        output_dir=scratch,
        max_steps=1 + scale.steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=scale.sequences // micro_batch,
        num_generations=scale.samples,
        max_completion_length=scale.tokens,
        # Samples end by their length only.
        generation_kwargs={"min_new_tokens": scale.tokens},
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        scale_rewards="none",
        learning_rate=LEARNING_RATE,
        shuffle_dataset=False,
        use_vllm=False,
        **CPU_TRAINER,
    )


def main() -> None:
    replies, job = Replies(), read_job()
    scale = Scale(**job["scale"])
    torch.set_num_threads(job["threads"])

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        short = sum(len(ids) != scale.tokens for ids in completion_ids)
        if short or len(completions) != scale.sequences:
            replies.send(fault=f"{len(completions)} samples came, {short} of another length")
        return [vowels(text) for text in completions]

    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    lengths = {len(ids) for ids in tokenizer(job["texts"])["input_ids"]}
    if lengths != {scale.prompt_tokens}:
        replies.send(fault=f"the prompts have {sorted(lengths)} tokens")
    trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=settings(scale, job["scratch"]),
        train_dataset=Dataset.from_dict({"prompt": job["texts"]}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(LAYERS)),
    )
    trainer.replies = replies
    trainer.add_callback(Clock(trainer))
    trainer.train()
    b = [p for name, p in trainer.model.named_parameters() if "lora_B" in name]
    if not any(bool(p.any()) for p in b):
        replies.send(fault="the weights did not change")


if __name__ == "__main__":
    main()
