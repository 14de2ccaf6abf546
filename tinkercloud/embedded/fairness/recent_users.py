"""Who had work a moment ago, and may come back."""

import time
from collections.abc import Callable

SLICE_S = 0.1
"""How long sampling keeps another user's training waiting, and training samples, as far as their
steps can be cut."""
MOMENT_S = 10.0


class RecentUsers:
    """Users who were seen within the last moment. clock: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._seen_s: dict[str, float] = {}

    def see(self, user: str) -> None:
        self._seen_s[user] = self._clock()

    def users(self) -> frozenset[str]:
        since_s = self._clock() - MOMENT_S
        self._seen_s = {user: at_s for user, at_s in self._seen_s.items() if at_s > since_s}
        return frozenset(self._seen_s)
