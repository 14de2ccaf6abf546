"""How well a model answers held-out problems."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from lib import chat, tasks

MAX_TOKENS = 16
SAMPLES_PER_PROBLEM = 4
SEED = 2**32  # far from the seeds of training


@dataclass(frozen=True)
class Evaluation:
    """accuracy: the part of all samples at temperature 1 that is right. examples: (question,
    answer, right) of the first sample of each problem. counted: what the accuracy is of."""

    accuracy: float
    num_samples: int
    examples: list[tuple[str, str, bool]]
    counted: str = "held-out answers right"


def evaluate(
    sdk: ModuleType, sampler: Any, tokenizer: Any, problems: list[tasks.Problem]
) -> Evaluation:
    """Sample every problem at temperature 1, as RL does; the seeds are fixed."""
    futures = [
        sampler.sample(
            prompt=sdk.ModelInput.from_ints(chat.prompt_tokens(tokenizer, problem.question)),
            num_samples=SAMPLES_PER_PROBLEM,
            sampling_params=sdk.SamplingParams(max_tokens=MAX_TOKENS, seed=SEED + i),
        )
        for i, problem in enumerate(problems)
    ]
    grades: list[float] = []
    examples: list[tuple[str, str, bool]] = []
    for problem, future in zip(problems, futures, strict=True):
        answers = [chat.answer_text(tokenizer, s.tokens) for s in future.result().sequences]
        grades += [tasks.grade(problem, answer) for answer in answers]
        examples.append((problem.question, answers[0], bool(tasks.grade(problem, answers[0]))))
    return Evaluation(sum(grades) / len(grades), len(grades), examples)
