"""What a client may choose."""

import secrets
from dataclasses import dataclass

from tinkercloud.core.types import SamplingParams
from tinkercloud.errors import ConfigError

_TIMES = ("draft_wait_s", "round_timeout_s", "reconnect_s")


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """max_tokens: of an output. max_rounds: of an output, None: as many as it takes. drafted:
    tokens that are asked of drafters for a round. branches: drafts that are verified together in
    one, as a tree. undrafted: tokens that the target samples in a round without a draft.

    temperature, top_k (-1: no limit), top_p, min_p: as the target draws; temperature 0: the
    likeliest tokens. seed: None draws one for each output.

    Times in seconds. draft_wait_s: for the drafts of a round. round_timeout_s: for the target's
    answer. reconnect_s: for how long a target that is gone is tried again.
    """

    max_tokens: int = 256
    max_rounds: int | None = None
    drafted: int = 8
    branches: int = 1
    undrafted: int = 16
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    draft_wait_s: float = 0.05
    round_timeout_s: float = 60.0
    reconnect_s: float = 10.0

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        positive = ("max_tokens", "max_rounds", "branches", "undrafted")
        least = dict.fromkeys(positive, 1) | dict.fromkeys(("drafted", *_TIMES), 0)
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ConfigError(f"{name} must be at least {lowest}, not {value}")
        if self.drafted * self.branches > 128 or self.branches > 16:
            raise ConfigError("a round has at most 128 drafted tokens, in 16 branches")
        if self.temperature < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise ConfigError("temperature, top_p or min_p is out of range")

    def params(self) -> SamplingParams:
        """With a seed that is drawn now, where none is set."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return SamplingParams(
            max_tokens=None, seed=seed, temperature=self.temperature, top_k=self.top_k,
            top_p=self.top_p, min_p=self.min_p,
        )  # fmt: skip
