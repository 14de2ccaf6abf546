"""Who is next: virtual token counters (Sheng et al., Fairness in Serving Large Language Models,
2024).

Each user with work has a counter of the tokens that were computed for it, and the one with the
least is next. A user who comes is lifted to one less than the least of those who have work: next,
but nobody saves time up by being idle. One who leaves and comes back keeps what is above that.
"""

from collections.abc import Iterable, Set


class VirtualCounters:
    """Of users who have work, and of those who had some while the others still have it."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._jobs: dict[str, int] = {}  # of users with work

    @property
    def users(self) -> Set[str]:
        """With work."""
        return self._jobs.keys()

    @property
    def num_users(self) -> int:
        """With work."""
        return len(self._jobs)

    def enter(self, user: str) -> None:
        """One more job of the user."""
        if user not in self._jobs:
            floor = min((self._tokens[each] for each in self._jobs), default=1.0) - 1.0
            self._tokens[user] = max(self._tokens.get(user, floor), floor)
        self._jobs[user] = self._jobs.get(user, 0) + 1

    def leave(self, user: str) -> None:
        """One job less."""
        self._jobs[user] -= 1
        if self._jobs[user]:
            return
        del self._jobs[user]
        if not self._jobs:
            self._tokens.clear()

    def clear(self) -> None:
        self._tokens.clear()
        self._jobs.clear()

    def charge(self, user: str, num_tokens: float) -> None:
        self._tokens[user] += num_tokens

    def tokens_of(self, user: str) -> float:
        return self._tokens[user]

    def next_of(self, users: Iterable[str]) -> str | None:
        """The user among these who was given least; the first of equals."""
        return min(users, key=self._tokens.__getitem__, default=None)

    def most_served_first(self, users: Iterable[str]) -> list[str]:
        return sorted(users, key=self._tokens.__getitem__, reverse=True)

    def is_least_served(self, user: str) -> bool:
        """Whether every other user with work was given more."""
        tokens = self._tokens[user]
        return all(self._tokens[each] > tokens for each in self._jobs if each != user)
