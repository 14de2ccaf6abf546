"""Times in which a disk refuses what is written."""

import errno
from collections.abc import Callable, Sequence

from tests.simulation.schedule import DiskTrouble

KEPT = ("after", "unlink", "rmdir")
"""What works nevertheless: what is done, and what makes room."""


class DiskTroubles:
    """Those of a schedule, one after the other. later: calls something after so many seconds.
    has_come: whether one has."""

    def __init__(
        self,
        troubles: Sequence[DiskTrouble],
        later: Callable[[float, Callable[[], None]], object],
        note: Callable[[str], None],
    ):
        self._left = list(troubles)
        self._later = later
        self._note = note
        self._num_changes = 0
        self._now: DiskTrouble | None = None
        self.has_come = False

    @property
    def is_now(self) -> bool:
        return self._now is not None

    def end(self) -> None:
        self._now = None

    def count(self, label: str) -> None:
        """One more change of the disk."""
        self._num_changes += bool(self._left) and label.startswith(self._left[0].at)

    def refused(self, label: str) -> OSError | None:
        """What a change of the disk ends with."""
        if self._left and self._num_changes >= self._left[0].count:
            self._now = self._left.pop(0)
            self._note(f"the disk: {self._now.error} for {self._now.for_s} s")
            self._later(self._now.for_s, self.end)
        if self._now is None or label.startswith(KEPT):
            return None
        self.has_come = True
        if self._now.error == "ENOSPC":
            return None if label == "fsync" else OSError(errno.ENOSPC, self._now.error)
        return OSError(errno.EIO, self._now.error)
