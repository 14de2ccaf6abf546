"""The one table from names to drafters."""

from collections.abc import Callable, Mapping

from tinkercloud.speculative.drafters.drafter import Drafter
from tinkercloud.speculative.drafters.suffix_drafter import SuffixDrafter

DrafterFactory = Callable[[str], Drafter]
"""From what follows the colon in "model:PATH", "" without one."""


class UnknownDrafterError(ValueError):
    """No drafter has that name."""


class DrafterTable:
    """From names, as in `--speculate NAME` or `NAME:ARGUMENT`, to new drafters: those that need no
    weights, and `more`, which may replace any of them."""

    def __init__(self, more: Mapping[str, DrafterFactory] | None = None) -> None:
        self._factories: dict[str, DrafterFactory] = {
            "off": lambda _: Drafter(),
            "suffix": lambda _: SuffixDrafter(),
            **(more or {}),
        }

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._factories)

    def make(self, name: str) -> Drafter:
        """Raises UnknownDrafterError."""
        name, _, argument = name.partition(":")
        if name not in self._factories:
            raise UnknownDrafterError(f"no drafter {name!r}; there are {', '.join(self.names)}")
        return self._factories[name](argument)
