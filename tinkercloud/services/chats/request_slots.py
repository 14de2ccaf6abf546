"""How many answers one user may have underway at a time."""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from tinkercloud.errors import TooManyRequests
from tinkercloud.services.accounts.quotas import Quotas

MAX_REQUESTS = 1024  # of one user


class RequestSlots:
    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._limit = MAX_REQUESTS
        self._underway: Counter[str] = Counter()

    def check(self, user: str) -> None:
        """Raises TooManyRequests."""
        if self._underway[user] >= self._limit:
            raise TooManyRequests(
                f"{self._limit} requests are underway with this key; wait until some have ended"
            )
        self._quotas.require(user)

    @contextmanager
    def held(self, user: str) -> Generator[None]:
        self._underway[user] += 1
        try:
            with self._quotas.underway(user):
                yield
        finally:
            self._underway[user] -= 1
            if not self._underway[user]:
                del self._underway[user]
