"""The one table from names to drafters."""

from collections.abc import Callable, Mapping

from tinkercloud.speculative.drafters.drafter import Drafter, SilentDrafter
from tinkercloud.speculative.drafters.suffix_drafter import SuffixDrafter
from tinkercloud.speculative.drafters.trial_drafters import RandomDrafter, WrongDrafter

DrafterFactory = Callable[
    [str], Drafter
]  # of what follows the colon in "model:PATH", "" without one


class UnknownDrafterError(ValueError):
    """No drafter has that name."""


class DrafterTable:
    """From names, as in `--speculate NAME` or `NAME:ARGUMENT`, to new drafters."""

    def __init__(self, makers: Mapping[str, DrafterFactory]) -> None:
        self._makers = dict(makers)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._makers)

    def make(self, named: str) -> Drafter:
        """Raises UnknownDrafterError."""
        name, _, argument = named.partition(":")
        if name not in self._makers:
            raise UnknownDrafterError(f"no drafter {name!r}; there are {', '.join(self.names)}")
        return self._makers[name](argument)


def drafter_table(
    vocab_size: int, more: Mapping[str, DrafterFactory] | None = None
) -> DrafterTable:
    """What needs no weights, and `more`, which may replace any of it."""
    makers: dict[str, DrafterFactory] = {
        "off": lambda _: SilentDrafter(),
        "suffix": lambda _: SuffixDrafter(),
        "always-wrong": lambda _: WrongDrafter(vocab_size),
        "random": lambda _: RandomDrafter(vocab_size),
    }
    return DrafterTable({**makers, **(more or {})})
