"""A draft head made from a model's own samples, where no policy has been trained yet.

The model writes, the head learns from the states and laws of what it wrote; a part of the texts is
held out, and the head is judged by how many of its tokens are expected to stand there.

Axes: V vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.commands.bench import Workload, run_timed
from tinkercloud.core.types import SampleRequest, SamplingParams
from tinkercloud.embedded.draft_training.dataset import Mix, SequenceDataset
from tinkercloud.embedded.draft_training.fit import Evaluation, Fit, Plan, joined
from tinkercloud.embedded.draft_training.head_trainer import (
    HeadObjective,
    HeadTrainer,
    SequenceMetadata,
)
from tinkercloud.embedded.draft_training.reference_capture import capture
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.sampling.engine import SamplingEngine
from tinkercloud.errors import UserError
from tinkercloud.speculative.head.head import FrozenRows, Head, HeadConfig, initial_params
from tinkercloud.speculative.head.vocabulary import DraftVocabulary
from tinkercloud.speculative.learning.draft_folder import DraftFolder
from tinkercloud.speculative.learning.schedule import TimeBudget

Say = Callable[[str], None]
MOST_BYTES = 2 * 1024**3  # of captured sequences
SECTION_S = 20.0  # of training, between two lines that tell how it goes


@dataclass(frozen=True, slots=True)
class DistillConfig:
    """samples: of each prompt, `tokens` of each, at `temperature`. vocabulary: tokens that the head
    can say. minutes: of training at most."""

    samples: int = 16
    tokens: int = 96
    temperature: float = 1.0
    vocabulary: int = 8192
    minutes: float = 15.0
    plan: Plan = field(default_factory=lambda: Plan(num_steps=600, warmup_steps=30))
    seed: int = 0


class Writing(Protocol):
    """samples: of each prompt, `tokens` of each. Another seed writes others."""

    @property
    def samples(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def temperature(self) -> float: ...

    @property
    def seed(self) -> int: ...


def requests_of(prompts: Sequence[Sequence[int]], config: Writing) -> list[SampleRequest]:
    return [
        SampleRequest(
            np.array(prompt, np.int32),
            config.samples,
            SamplingParams(config.tokens, config.seed + i, config.temperature),
        )
        for i, prompt in enumerate(prompts)
    ]


def sample_texts(
    version: Version, prompts: Sequence[Sequence[int]], config: Writing, num_threads: int
) -> list[tuple[int, NDArray[np.int32]]]:
    """(prompt tokens, all tokens) of each sample."""
    engine = SamplingEngine(max_batch=64, kv_cache_bytes=2**30, num_threads=num_threads)
    workload = Workload("prompts", version, tuple(requests_of(prompts, config)))
    found = run_timed(engine, workload).outputs
    return [
        (len(prompts[i]), np.concatenate([prompts[i], one.tokens]).astype(np.int32))
        for i in range(len(prompts))
        for one in found[i].sequences
    ]


def distilled(
    version: Version,
    texts: Sequence[tuple[int, NDArray[np.int32]]],
    config: DistillConfig,
    folder: DraftFolder,
    say: Say,
) -> dict[str, Any]:
    """Publishes a head as the model's best; what is noted of it. Raises UserError where there is
    too little text."""
    counts = torch.zeros(version.base.config.vocab_size, dtype=torch.int64)
    for _, tokens in texts:
        counts += torch.bincount(torch.from_numpy(tokens).long(), minlength=len(counts))
    vocabulary = DraftVocabulary.most_frequent(
        counts, min(config.vocabulary, len(counts)), version.base.config.eos_token_ids
    )
    head_config = HeadConfig.of(version.base.config)
    dataset = _captured(version, texts, head_config, config, say)
    head = Head(head_config, FrozenRows.of(version.base.weights, vocabulary))
    trainer = HeadTrainer(head, initial_params(head_config, config.seed), HeadObjective())
    held_out = dataset.held_out()
    if not held_out:
        raise UserError("too little text to hold a part of it out; ask for more samples")
    before = _judged(trainer, held_out)
    say(f"untaught: {before.mean:.2f} tokens of a draft are expected to stand")
    losses = _trained(trainer, dataset, config, say)
    after = _judged(trainer, held_out)
    notes = {
        "reason": "distilled from the model's own samples",
        "num_tokens": sum(len(tokens) for _, tokens in texts),
        "coverage": vocabulary.coverage(counts),
        "before": before.as_json(),
        "after": after.as_json(),
        "steps": len(losses),
    }
    parameters: dict[str, Tensor] = {n: p.detach() for n, p in trainer.params.items()}
    name = folder.publish(lambda path: trainer.write(parameters, path), notes)
    folder.use("best", name)
    return {"version": name, **notes}


def _captured(
    version: Version,
    texts: Sequence[tuple[int, NDArray[np.int32]]],
    head_config: HeadConfig,
    config: DistillConfig,
    say: Say,
) -> SequenceDataset:
    dataset = SequenceDataset(MOST_BYTES, 1, Mix(batch_size=8, seed=config.seed))
    began = time.monotonic()
    for i, (num_prompt, tokens) in enumerate(texts):
        if len(tokens) < 3:
            continue
        told = SequenceMetadata(num_prompt, config.temperature, 0)
        dataset.add(capture(version, tokens, head_config.layers, told))
        if time.monotonic() - began > SECTION_S:
            began = time.monotonic()
            say(f"read {i + 1} of {len(texts)} texts")
    return dataset


def _trained(
    trainer: HeadTrainer, dataset: SequenceDataset, config: DistillConfig, say: Say
) -> list[float]:
    fit = Fit(trainer, dataset.batch, config.plan)
    left_s = 60.0 * config.minutes
    while not fit.done and left_s > 0:
        budget = TimeBudget(share=1.0)
        budget.step_took(min(SECTION_S, left_s))
        fit.advance(budget)
        left_s -= budget.spent_s
        recent = float(np.mean(fit.losses[-20:]))
        say(f"step {len(fit.losses)} of {config.plan.num_steps}: loss {recent:.3f}")
    return fit.losses


def _judged(trainer: HeadTrainer, held_out: Sequence[Any]) -> Evaluation:
    return joined([trainer.evaluate(batch) for batch in held_out])
