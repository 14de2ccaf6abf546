"""The memory that bodies of requests, and large answers, may take together.

A body asks for its bytes before it takes them, while it is read and while it is decompressed. One
that finds no room waits for others to end, and is then refused as a client repeats it (429: wire
specification, section 5). One user gets half at most, so that nobody can shut the others out.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from tinkercloud.errors import PayloadTooLarge, TooManyRequests

FREE_BYTES = 64 * 1024
"""Of each body, not counted: polls and heartbeats must pass while large bodies wait. There are no
more of them than connections."""
WAIT_S = 5.0
LEASE_KEY = "tinkercloud.lease"  # where the middleware leaves a request's lease in the ASGI scope


class BodyBudget:
    """total_bytes: of all bodies. wait_s: how long a body waits for room."""

    def __init__(self, total_bytes: int, wait_s: float = WAIT_S):
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self._wait_s = wait_s
        self._by_user: Counter[str] = Counter()
        self._leases: set[BodyLease] = set()  # those that hold counted bytes
        self._waiting: list[_Waiter] = []

    @property
    def user_bytes(self) -> int:
        """The most that the bodies of one user may take."""
        return self.total_bytes // 2

    def lease(self, user: str) -> "BodyLease":
        return BodyLease(self, user)

    async def take(self, lease: "BodyLease", num_bytes: int) -> None:
        """Raises TooManyRequests, PayloadTooLarge."""
        if not self._taken(lease, num_bytes):
            await self._wait_for_room(lease, num_bytes)

    def take_at_once(self, lease: "BodyLease", num_bytes: int) -> None:
        """Raises TooManyRequests, PayloadTooLarge."""
        if not self._taken(lease, num_bytes):
            raise self._busy(num_bytes)

    def _taken(self, lease: "BodyLease", num_bytes: int) -> bool:
        """False where there is no room just now. Raises PayloadTooLarge where there never is."""
        if lease.counted_bytes + num_bytes > self.user_bytes:
            raise PayloadTooLarge(
                f"this request takes more than {self.user_bytes} bytes of memory here, half of the "
                "server's body_memory_bytes; ask or send less in one"
            )
        fits = self._fits(lease, num_bytes)
        if fits:
            self._count(lease, num_bytes)
        return fits

    def give_back(self, lease: "BodyLease", num_bytes: int) -> None:
        self._count(lease, -num_bytes)
        if num_bytes:
            self._wake()

    def _fits(self, lease: "BodyLease", num_bytes: int) -> bool:
        room = self.used_bytes + num_bytes <= self.total_bytes
        return room and self._fits_user(lease.user, num_bytes)

    def _fits_user(self, user: str, num_bytes: int) -> bool:
        return self._by_user[user] + num_bytes <= self.user_bytes

    def _count(self, lease: "BodyLease", num_bytes: int) -> None:
        self.used_bytes += num_bytes
        self._by_user[lease.user] += num_bytes
        lease.counted_bytes += num_bytes
        if lease.counted_bytes:
            self._leases.add(lease)
        else:
            self._leases.discard(lease)

    async def _wait_for_room(self, lease: "BodyLease", num_bytes: int) -> None:
        if not self._room_may_come(lease, num_bytes):
            # Each holds a part and waits for the others: only a refusal gives any of it back.
            raise self._busy(num_bytes)
        waiter = _Waiter(lease, num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            await asyncio.wait([waiter.granted], timeout=self._wait_s)
            if not waiter.granted.done():
                raise self._busy(num_bytes)
        except asyncio.CancelledError:
            if waiter.granted.done():
                self.give_back(lease, num_bytes)
            raise
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def _room_may_come(self, lease: "BodyLease", num_bytes: int) -> bool:
        """Whether a body that helps may end, and does not wait for room itself."""
        waiting = {waiter.lease for waiter in self._waiting} | {lease}
        user_is_full = not self._fits_user(lease.user, num_bytes)
        return any(
            held not in waiting and (held.user == lease.user or not user_is_full)
            for held in self._leases
        )

    def _wake(self) -> None:
        """In the order of arrival, but a large body that must wait on does not hold up others."""
        for waiter in list(self._waiting):
            if not waiter.granted.done() and self._fits(waiter.lease, waiter.num_bytes):
                self._count(waiter.lease, waiter.num_bytes)
                self._waiting.remove(waiter)
                waiter.granted.set_result(None)

    def _busy(self, num_bytes: int) -> TooManyRequests:
        return TooManyRequests(
            f"other requests fill the memory of bodies and large answers: {self.used_bytes} "
            f"of {self.total_bytes} bytes (body_memory_bytes; {self.user_bytes} of them for one "
            f"user), and this one needs {num_bytes} more; send it again in a moment"
        )


class BodyLease:
    """What one body takes. counted_bytes: beyond the free ones."""

    def __init__(self, budget: BodyBudget, user: str):
        self._budget = budget
        self.user = user
        self.counted_bytes = 0
        self._num_bytes = 0

    async def grow(self, num_bytes: int) -> None:
        """Before as many more bytes are taken. Raises TooManyRequests, PayloadTooLarge."""
        counted = max(0, self._num_bytes + num_bytes - FREE_BYTES)
        if counted > self.counted_bytes:
            await self._budget.take(self, counted - self.counted_bytes)
        self._num_bytes += num_bytes

    def grow_at_once(self, num_bytes: int) -> None:
        """The same without waiting, for what is in memory already. Raises TooManyRequests,
        PayloadTooLarge."""
        counted = max(0, self._num_bytes + num_bytes - FREE_BYTES)
        if counted > self.counted_bytes:
            self._budget.take_at_once(self, counted - self.counted_bytes)
        self._num_bytes += num_bytes

    def shrink(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes
        counted = max(0, self._num_bytes - FREE_BYTES)
        self._budget.give_back(self, self.counted_bytes - counted)

    def release(self) -> None:
        self.shrink(self._num_bytes)


def lease_of(request: HTTPConnection) -> BodyLease:
    lease = request.scope[LEASE_KEY]
    assert isinstance(lease, BodyLease)
    return lease


@dataclass(slots=True, eq=False)
class _Waiter:
    lease: BodyLease
    num_bytes: int
    granted: "asyncio.Future[None]"
