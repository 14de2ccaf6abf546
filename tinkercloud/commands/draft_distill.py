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

from tinkercloud.commands.bench import Case, timed
from tinkercloud.core.types import SampleRequest, SamplingParams
from tinkercloud.embedded.draft_training.dataset import CapturedSequences, Mix
from tinkercloud.embedded.draft_training.fit import Evaluation, Fit, Plan, joined
from tinkercloud.embedded.draft_training.head_model import HeadStudent, HeadTraining, Told
from tinkercloud.embedded.draft_training.reference_capture import capture
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.sampling.engine import SamplingEngine
from tinkercloud.errors import UserError
from tinkercloud.speculative.head.head import FrozenRows, Head, HeadConfig, fresh_params
from tinkercloud.speculative.head.vocabulary import DraftVocabulary
from tinkercloud.speculative.learning.draft_folder import DraftFolder
from tinkercloud.speculative.learning.schedule import TimeBudget

Say = Callable[[str], None]
MOST_BYTES = 2 * 1024**3  # of captured sequences
SECTION_S = 20.0  # of training, between two lines that tell how it goes


@dataclass(frozen=True, slots=True)
class Distillation:
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


def requests_of(prompts: Sequence[Sequence[int]], wanted: Writing) -> list[SampleRequest]:
    return [
        SampleRequest(
            np.array(prompt, np.int32),
            wanted.samples,
            SamplingParams(wanted.tokens, wanted.seed + i, wanted.temperature),
        )
        for i, prompt in enumerate(prompts)
    ]


def written(
    version: Version, prompts: Sequence[Sequence[int]], wanted: Writing, num_threads: int
) -> list[tuple[int, NDArray[np.int32]]]:
    """(prompt tokens, all tokens) of each sample."""
    engine = SamplingEngine(max_batch=64, kv_cache_bytes=2**30, num_threads=num_threads)
    case = Case("prompts", version, tuple(requests_of(prompts, wanted)))
    found = timed(engine, case).outputs
    return [
        (len(prompts[i]), np.concatenate([prompts[i], one.tokens]).astype(np.int32))
        for i in range(len(prompts))
        for one in found[i].sequences
    ]


def distilled(
    version: Version,
    texts: Sequence[tuple[int, NDArray[np.int32]]],
    wanted: Distillation,
    folder: DraftFolder,
    say: Say,
) -> dict[str, Any]:
    """Publishes a head as the model's best; what is noted of it. Raises UserError where there is
    too little text."""
    counts = torch.zeros(version.base.config.vocab_size, dtype=torch.int64)
    for _, tokens in texts:
        counts += torch.bincount(torch.from_numpy(tokens).long(), minlength=len(counts))
    vocabulary = DraftVocabulary.most_frequent(
        counts, min(wanted.vocabulary, len(counts)), version.base.config.eos_token_ids
    )
    config = HeadConfig.of(version.base.config)
    material = _captured(version, texts, config, wanted, say)
    head = Head(config, FrozenRows.of(version.base.weights, vocabulary))
    student = HeadStudent(head, fresh_params(config, wanted.seed), HeadTraining())
    held_out = material.held_out()
    if not held_out:
        raise UserError("too little text to hold a part of it out; ask for more samples")
    before = _judged(student, held_out)
    say(f"untaught: {before.mean:.2f} tokens of a draft are expected to stand")
    losses = _trained(student, material, wanted, say)
    after = _judged(student, held_out)
    notes = {
        "reason": "distilled from the model's own samples",
        "num_tokens": sum(len(tokens) for _, tokens in texts),
        "coverage": vocabulary.coverage(counts),
        "before": before.as_json(),
        "after": after.as_json(),
        "steps": len(losses),
    }
    parameters: dict[str, Tensor] = {n: p.detach() for n, p in student.params.items()}
    name = folder.publish(lambda path: student.write(parameters, path), notes)
    folder.use("best", name)
    return {"version": name, **notes}


def _captured(
    version: Version,
    texts: Sequence[tuple[int, NDArray[np.int32]]],
    config: HeadConfig,
    wanted: Distillation,
    say: Say,
) -> CapturedSequences:
    material = CapturedSequences(MOST_BYTES, 1, Mix(batch_size=8, seed=wanted.seed))
    began = time.monotonic()
    for i, (num_prompt, tokens) in enumerate(texts):
        if len(tokens) < 3:
            continue
        told = Told(num_prompt, wanted.temperature, 0)
        material.add(capture(version, tokens, config.layers, told))
        if time.monotonic() - began > SECTION_S:
            began = time.monotonic()
            say(f"read {i + 1} of {len(texts)} texts")
    return material


def _trained(
    student: HeadStudent, material: CapturedSequences, wanted: Distillation, say: Say
) -> list[float]:
    fit = Fit(student, material.batch, wanted.plan)
    left_s = 60.0 * wanted.minutes
    while not fit.done and left_s > 0:
        budget = TimeBudget(share=1.0)
        budget.step_took(min(SECTION_S, left_s))
        fit.advance(budget)
        left_s -= budget.spent_s
        recent = float(np.mean(fit.losses[-20:]))
        say(f"step {len(fit.losses)} of {wanted.plan.num_steps}: loss {recent:.3f}")
    return fit.losses


def _judged(student: HeadStudent, held_out: Sequence[Any]) -> Evaluation:
    return joined([student.evaluate(batch) for batch in held_out])
