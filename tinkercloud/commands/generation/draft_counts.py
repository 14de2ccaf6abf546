"""What drafts did between two readings of a server's health."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tinkercloud.commands.generation.api_client import ApiClient
from tinkercloud.errors import UserError


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Drafted tokens that the model judged, and those that it accepted."""

    judged: int
    accepted: int

    def since(self, before: "DraftCounts") -> "DraftCounts":
        return DraftCounts(self.judged - before.judged, self.accepted - before.accepted)

    @property
    def line(self) -> str:
        if self.judged <= 0:
            return "no drafts"
        share = self.accepted / self.judged
        return f"{share:.0%} of {self.judged} drafted tokens accepted"


def read_counts(client: ApiClient) -> DraftCounts | None:
    """Since the server's start, over all drafters and users; None: this key may not see them, or
    the server does not draft."""
    try:
        speculation = client.get("/health").get("speculation")
    except UserError:
        return None
    if not speculation:
        return None
    depths = list(_depths(speculation))
    return DraftCounts(
        sum(int(depth["verified"]) for depth in depths),
        sum(int(depth["accepted"]) for depth in depths),
    )


def _depths(node: Any) -> Iterator[Mapping[str, Any]]:
    """The counts of every drafter, wherever it lies: by base model, and by engine."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == "depths" and isinstance(value, list):
                yield from value
            else:
                yield from _depths(value)
