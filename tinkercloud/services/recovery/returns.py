"""Models on their way back into the engine's memory, and those whose way back ends the engine.

A replay that ends the engine each time would end it for ever, and with it what others do. So it is
given up for a while: the model's operations fail by name, and the rest goes on.
"""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from tinkercloud.errors import ServerFault

Key = tuple[str, str]  # user, model
MAX_ENDS = 3
GIVEN_UP_S = 600.0
"""How long a model is not tried again: memory that was short may be there by then."""


class CannotComeBack(ServerFault):
    """Trying again would not help: what is kept of the model is not as it was written, or ends the
    engine."""


READS_SNAPSHOT = "its snapshot is read"


@dataclass(slots=True)
class Return:
    """Of a model. doing: what is done for it just now, in words. num_ends: of the engine while the
    same was done, one after the other."""

    model_id: str
    doing: str = READS_SNAPSHOT
    num_ends: int = 0
    _at_end: str = ""

    def engine_ended(self) -> None:
        """Raises CannotComeBack where it has ended at this too often."""
        self.num_ends = self.num_ends + 1 if self._at_end == self.doing else 1
        self._at_end = self.doing
        if self.num_ends == MAX_ENDS:
            raise CannotComeBack(
                f"{self.model_id} cannot be brought back: the engine process ended each of the "
                f"{MAX_ENDS} times while {self.doing}; it is tried again in "
                f"{GIVEN_UP_S / 60:.0f} minutes. See the server's log for the reason, give it more "
                "memory, or go on from your last checkpoint"
            )


class Returns:
    def __init__(self) -> None:
        self._underway: dict[str, Return] = {}  # by model id
        self._given_up: dict[Key, tuple[float, str]] = {}  # until when (monotonic), why

    @contextmanager
    def begin(self, key: Key) -> Generator[Return]:
        """Called where no operation of the model runs. Raises CannotComeBack, and where the block
        does, so does this one for a while."""
        until, why = self._given_up.get(key, (0.0, ""))
        if why and time.monotonic() < until:
            raise CannotComeBack(why)
        self.forget(key)
        way = self._underway[key[1]] = Return(key[1])
        try:
            yield way
        except CannotComeBack as failure:
            if way.num_ends == MAX_ENDS:
                self._given_up[key] = time.monotonic() + GIVEN_UP_S, str(failure)
            raise
        finally:
            del self._underway[key[1]]

    def forget(self, key: Key) -> None:
        """It is tried again at once, or never needed."""
        self._given_up.pop(key, None)

    def delay_of(self, model_id: str) -> str | None:
        """Why an operation of the model waits, in words for its user; None: not for its return."""
        way = self._underway.get(model_id)
        return None if way is None else f"the model is being brought back: {way.doing}"
