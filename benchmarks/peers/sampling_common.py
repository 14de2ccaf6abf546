"""What every contender of the sampling benchmark is asked, and what it answers.

Only the standard library is needed here, so that a peer's environment needs only its own packages.
"""

import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol


@dataclass(frozen=True)
class Load:
    """Requests that arrive at once: one for each prompt, `num_samples` samples of each, exactly
    `max_tokens` new tokens of each sample. Temperature 1 over the whole vocabulary, or greedy."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    num_samples: int = 1
    greedy: bool = False

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.num_samples

    @property
    def new_tokens(self) -> int:
        return self.num_sequences * self.max_tokens

    @property
    def prompt_tokens(self) -> int:
        """A shared prompt counted once."""
        return sum(map(len, self.prompts))

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts)) + self.max_tokens

    @property
    def warm_up(self) -> "Load":
        """A short load of the same shape: what a contender makes at the first request is made."""
        return Load(tuple(prompt[:8] for prompt in self.prompts), 4, self.num_samples)


@dataclass
class Outcome:
    """samples: new tokens of each sequence, in the order of the prompts. failed: sequences that did
    not come, or came with the wrong number of tokens. first_s: seconds from the submission to the
    first token, of each sequence where it can be seen; gaps_s: between two tokens of a sequence."""

    wall_s: float
    samples: list[list[int]]
    failed: int = 0
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    def with_times(self, other: "Outcome") -> "Outcome":
        """This one, with what another run of the load adds to failures and times of tokens."""
        return replace(
            self,
            failed=self.failed + other.failed,
            first_s=self.first_s + other.first_s,
            gaps_s=self.gaps_s + other.gaps_s,
        )


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


class Contender(Protocol):
    name: str
    version: str

    @property
    def pid(self) -> int | None:
        """Of its process, which may have others below it; None where none runs."""
        ...

    async def prepare(self, load: Load) -> None:
        """Get ready for loads of this size; not timed."""
        ...

    async def generate(self, load: Load) -> Outcome: ...

    async def latency(self, load: Load) -> Outcome | None:
        """The same with first_s and, where they can be seen, gaps_s; None: `generate` has them."""
        ...

    async def close(self) -> None: ...


def outcome(load: Load, start: float, samples: list[list[int]]) -> Outcome:
    """Of a load that began at `start` (perf_counter) and has just ended."""
    wall_s = time.perf_counter() - start
    whole = [tokens for tokens in samples if len(tokens) == load.max_tokens]
    return Outcome(wall_s, samples, load.num_sequences - len(whole))
