"""The work of every contender of the RL benchmark, and the record of its steps.

Only the standard library is needed here, so that a peer's environment needs only its own packages.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

PHASES = ("sample", "reward", "forward_backward", "optim_step", "publish")
RANK = 32
LEARNING_RATE = 1e-4
MICROBATCH = 8
"""Sequences that a peer trains on at once: about 1024 tokens of the full form."""


@dataclass(frozen=True)
class Scale:
    """A step: `prompts` prompts of `prompt_tokens`, `samples` samples of each, `tokens` new tokens
    of each sample. steps: how many count, after the first."""

    prompts: int = 64
    samples: int = 8
    tokens: int = 64
    prompt_tokens: int = 64
    steps: int = 1

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def new_tokens(self) -> int:
        return self.sequences * self.tokens


@dataclass(frozen=True)
class Work:
    """model: a Hugging Face folder. texts: the prompts, each of exactly `prompt_tokens` tokens."""

    model: str
    texts: list[str]
    scale: Scale
    threads: int


def vowels(text: str) -> float:
    """The reward: the share of vowels among the characters."""
    return sum(character in "aeiou" for character in text) / max(len(text), 1)


def centred(rewards: Sequence[float]) -> list[float]:
    """Advantages within a group: what each reward is above their mean."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


@dataclass
class StepLog:
    """The phases of whole steps, in seconds, and what was under way when it ended.

    gap: mean |trainer's - sampler's| log-probability of the sampled tokens, the worst step's; None
    where a contender does not report it. fault: what was wrong; stopped: what was done when the
    limit was reached; unfinished_s: how long the step that was under way then had taken."""

    steps: list[dict[str, float]] = field(default_factory=list)
    gap: float | None = None
    fault: str = ""
    stopped: str = ""
    doing: str = "starting"
    current: dict[str, float] = field(default_factory=dict)
    step_start: float | None = None
    unfinished_s: float | None = None

    def begin(self, phase: str) -> None:
        self.doing = phase
        if self.step_start is None:
            self.step_start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.begin(name)
        start = time.perf_counter()
        yield
        self.current[name] = time.perf_counter() - start

    def end_step(self) -> None:
        self.steps.append(self.current)
        self.current, self.step_start, self.doing = {}, None, "between steps"

    def stop(self, limit_s: float) -> None:
        """At the limit: keep what was done."""
        if self.step_start is not None:
            self.unfinished_s = time.perf_counter() - self.step_start
        phases = [f"{name} {seconds:.0f} s" for name, seconds in self.current.items()]
        whole = f"{len(self.steps)} whole step{'s' * (len(self.steps) != 1)}"
        self.stopped = f"after {limit_s:.0f} s: {', '.join([whole, *phases])}; then in {self.doing}"

    @property
    def counted(self) -> list[dict[str, float]]:
        """Without the first, which compiles and allocates."""
        return self.steps[1:]

    @property
    def step_s(self) -> float | None:
        """The mean of the steps that count."""
        times = [sum(step.values()) for step in self.counted]
        return sum(times) / len(times) if times else None

    def share(self, phase: str) -> float:
        """Of the counted steps' time; of the first's where it is the only one."""
        steps = self.counted or self.steps
        whole = sum(sum(step.values()) for step in steps)
        return sum(step.get(phase, 0.0) for step in steps) / whole if whole else 0.0
