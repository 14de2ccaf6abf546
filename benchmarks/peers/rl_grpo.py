"""TRL's GRPOTrainer with PEFT, generating by transformers: the process of `rl_trl`, in the peer's
environment. It prints a JSON line when a phase begins, when it ends, and at the end of a step.

Its loss reads past an adapter on the unembedding, so the adapter is on the other layers only.
"""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peers.rl_common import LEARNING_RATE, MICROBATCH, RANK, Scale, vowels
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
REPLIES, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no reply


def say(**what: Any) -> None:
    REPLIES.write(json.dumps(what) + "\n")
    REPLIES.flush()


class Timed(GRPOTrainer):
    """Says when its parts begin, and how long they took; all else of a step is training.

    parts_s: seconds of this step that were not training."""

    parts_s = 0.0

    def _generate(self, *given: Any, **more: Any) -> Any:
        with self._part("sample"):
            return super()._generate(*given, **more)

    def _calculate_rewards(self, *given: Any, **more: Any) -> Any:
        with self._part("reward"):
            return super()._calculate_rewards(*given, **more)

    def compute_loss(self, *given: Any, **more: Any) -> Any:
        loss = super().compute_loss(*given, **more)
        if not math.isfinite(float(loss.detach())):
            say(fault="the loss is not finite")
        return loss

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        say(begins=name)
        begun = time.perf_counter()
        yield
        seconds = time.perf_counter() - begun
        self.parts_s += seconds
        say(phases={name: seconds}, begins="forward_backward")


class Clock(TrainerCallback):
    """The whole of each step, and its update."""

    def __init__(self, trainer: Timed):
        self._trainer = trainer
        self._begun = self._updating = self._update_s = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begun, self._trainer.parts_s = time.perf_counter(), 0.0

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._updating = time.perf_counter()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._update_s = time.perf_counter() - self._updating

    def on_step_end(self, *_: Any, **__: Any) -> None:
        whole_s = time.perf_counter() - self._begun
        training_s = whole_s - self._trainer.parts_s - self._update_s
        say(phases={"forward_backward": training_s, "optim_step": self._update_s}, step=True)


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
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        use_vllm=False,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
    )


def main() -> None:
    told = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    scale = Scale(**told["scale"])
    torch.set_num_threads(told["threads"])

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        short = sum(len(ids) != scale.tokens for ids in completion_ids)
        if short or len(completions) != scale.sequences:
            say(fault=f"{len(completions)} samples came, {short} of another length")
        return [vowels(text) for text in completions]

    tokenizer = AutoTokenizer.from_pretrained(told["model"])
    lengths = {len(ids) for ids in tokenizer(told["texts"])["input_ids"]}
    if lengths != {scale.prompt_tokens}:
        say(fault=f"the prompts have {sorted(lengths)} tokens")
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(told["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=settings(scale, told["scratch"]),
        train_dataset=Dataset.from_dict({"prompt": told["texts"]}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(LAYERS)),
    )
    trainer.add_callback(Clock(trainer))
    trainer.train()
    b = [p for name, p in trainer.model.named_parameters() if "lora_B" in name]
    if not any(bool(p.any()) for p in b):
        say(fault="the weights did not change")


if __name__ == "__main__":
    main()
