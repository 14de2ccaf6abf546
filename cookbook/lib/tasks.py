"""The two tasks of the recipes. Every answer is one JSON object with one number.

Of both, some problems are held out: they are never trained on. Which ones is fixed, so that figures
of different runs compare.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

NUM_HELD_OUT = 32


@dataclass(frozen=True)
class Problem:
    question: str
    result: int

    @property
    def answer(self) -> str:
        return json.dumps({"answer": self.result})


@dataclass(frozen=True)
class Split:
    train: list[Problem]
    held_out: list[Problem]


def sums() -> Split:
    """The 81 sums from 1 + 1 to 9 + 9."""
    digits = range(1, 10)
    return _split([Problem(f"{a} + {b}", a + b) for a in digits for b in digits])


def comparisons() -> Split:
    """The 8,010 ordered pairs of different two-digit numbers, and which is the larger."""
    numbers = range(10, 100)
    return _split(
        [
            Problem(f"Which is larger, {a} or {b}?", max(a, b))
            for a in numbers
            for b in numbers
            if a != b
        ]
    )


def grade(problem: Problem, answer: str) -> float:
    """1.0 for exactly the right JSON object and nothing else, otherwise 0.0."""
    return float(answer.strip() == problem.answer)


def batches(problems: list[Problem], size: int, seed: int) -> Iterator[list[Problem]]:
    """Batches without end; every problem once before any comes twice."""
    rng = random.Random(seed)
    waiting: list[Problem] = []
    while True:
        while len(waiting) < size:
            waiting += rng.sample(problems, len(problems))
        yield waiting[:size]
        waiting = waiting[size:]


def _split(problems: list[Problem]) -> Split:
    random.Random(0).shuffle(problems)
    return Split(train=problems[NUM_HELD_OUT:], held_out=problems[:NUM_HELD_OUT])
