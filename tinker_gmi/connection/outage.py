"""What a user is told while the server is away: requests are repeated for minutes, in silence."""

import logging
import time

logger = logging.getLogger("tinker_gmi")


class Outage:
    """Warns when a server cannot be reached, and when it can again, once each, however many
    requests wait for it. give_up_s: for how long a request is repeated."""

    def __init__(self, base_url: str, give_up_s: float):
        self._base_url = base_url
        self._give_up_s = give_up_s
        self._began: float | None = None

    def failed(self, error: Exception) -> None:
        """A request found no server."""
        if self._began is not None:
            return
        self._began = time.monotonic()
        logger.warning(
            "%s cannot be reached (%s); trying again for up to %.0f s",
            self._base_url, str(error) or type(error).__name__, self._give_up_s,
        )  # fmt: skip

    def answered(self) -> None:
        if self._began is None:
            return
        away_s = time.monotonic() - self._began
        self._began = None
        logger.warning("%s answers again, after %.0f s", self._base_url, away_s)
