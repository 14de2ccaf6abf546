"""Drafters that are no use, to show that what is written does not depend on the drafter."""

import random
import time
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from torch import Tensor

from tinkercloud.speculative.drafters.draft_distribution import DraftDistribution
from tinkercloud.speculative.drafters.drafter import Draft, Drafter, Stream
from tinkercloud.speculative.drafters.drafter_table import DrafterTable

Future = Callable[[Stream], Sequence[int]]  # what the target will write from here on, if known


class WrongDrafter(Drafter):
    """Drafts what the target does not write, each token being the next in the vocabulary to what
    `future` knows; where it is not given, to the sample's last tokens, which may err and be right.
    """

    def __init__(self, vocab_size: int, future: Future | None = None) -> None:
        self._vocab_size = vocab_size
        self._future = future

    name = "always-wrong"

    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        return [self._draft(stream, most) for stream, most in requests]

    def _draft(self, stream: Stream, most: int) -> Draft:
        right = self._future(stream) if self._future else stream.tokens[-most:]
        wrong = tuple((token + 1) % self._vocab_size for token in right[:most])
        return Draft(wrong, (1.0,) * len(wrong))


class RandomDrafter(Drafter):
    """Any tokens, always as many as asked, with any confidence."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    name = "random"

    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        return [self._draft(most) for _, most in requests]

    def _draft(self, most: int) -> Draft:
        tokens = tuple(self._random.randrange(self._vocab_size) for _ in range(most))
        return Draft(tokens, tuple(self._random.random() for _ in tokens))


class DyingDrafter(Drafter):
    """Another drafter that fails from its `num_good`th call on, counted over all its methods."""

    def __init__(self, drafter: Drafter, num_good: int) -> None:
        self._drafter = drafter
        self._left = num_good
        self.is_coupled = drafter.is_coupled
        self.layers = drafter.layers
        self.name = f"dying {drafter.name}"

    def begin(self, stream: Stream) -> None:
        self._live()
        self._drafter.begin(stream)

    def observe_hidden(self, stream: Stream, first: int, hidden: Tensor) -> None:
        self._live()
        self._drafter.observe_hidden(stream, first, hidden)

    def observe(self, stream: Stream, num_new: int) -> None:
        self._live()
        self._drafter.observe(stream, num_new)

    def end(self, stream: Stream) -> None:
        self._live()
        self._drafter.end(stream)

    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        self._live()
        return self._drafter.propose(requests)

    def _live(self) -> None:
        if self._left <= 0:
            raise RuntimeError("the drafter is dead")
        self._left -= 1


class LateDrafter(RandomDrafter):
    """Random tokens, each time after `delay_s`."""

    def __init__(self, vocab_size: int, delay_s: float) -> None:
        super().__init__(vocab_size)
        self._delay_s = delay_s

    name = "late"

    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        time.sleep(self._delay_s)
        return super().propose(requests)


class GarbageDrafter(Drafter):
    """Answers of every kind that the contract does not allow, and some that it does."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    name = "garbage"

    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        answer: list[object] = [self._draft(most) for _, most in requests]
        kind = self._random.randrange(8)
        if kind == 0:
            return cast(list[Draft], None)
        if kind == 1:
            answer.append(Draft())
        if kind == 2 and answer:
            answer.pop()
        return cast(list[Draft], answer)

    def _draft(self, most: int) -> object:
        good, size = self._random.random(), self._vocab_size
        no_distribution = DraftDistribution(
            np.array([size], np.int32), np.array([good], np.float32)
        )
        tokens = tuple(self._random.randrange(size) for _ in range(most))
        return self._random.choice(
            [
                Draft(tokens, (good,) * most),
                Draft((*tokens, 0), (good,) * (most + 1)),
                Draft((*tokens[1:], size), (good,) * max(1, most)),
                Draft((*tokens[1:], -1), (good,) * max(1, most)),
                Draft(tokens, (float("nan"),) * most),
                Draft(tokens, (float("inf"),) * most),
                Draft(tokens, (good,) * (most + 1)),
                Draft(cast(tuple[int, ...], ("a",) * most), (good,) * most),
                Draft(cast(tuple[int, ...], list(tokens)), (good,) * most),
                Draft(tokens, cast(tuple[float, ...], ("b",) * most)),
                Draft(tokens, (good,) * most, (no_distribution,) * most),
                Draft(tokens, (good,) * most, cast(tuple[DraftDistribution, ...], tokens)),
                None,
                tokens,
            ]
        )


def trial_table(vocab_size: int) -> DrafterTable:
    """The drafters that need no weights, with two that are no use."""
    return DrafterTable(
        {
            "always-wrong": lambda _: WrongDrafter(vocab_size),
            "random": lambda _: RandomDrafter(vocab_size),
        }
    )
