"""Long work on a model's tensors in parts, between which the worker thread serves others."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

Between = Callable[[], None]
"""Called between two parts. It touches none of the tensors that are worked on."""


def nothing() -> None:
    """Nobody waits."""


def in_parts(items: Iterable[T], between: Between) -> Iterator[T]:
    for item in items:
        between()
        yield item
