"""Whether Ray is there, and the answers that this process still awaits from its actors.

When a driver's Ray goes away, what it asked of actors is answered late or never. So all such
waiting ends here, and nothing new is asked until there is a Ray again.
"""

import asyncio
from typing import Any

from tinkercloud.errors import EngineDied


class RayLink:
    """lost: why there is no Ray; None: there is one."""

    def __init__(self) -> None:
        self.lost: str | None = None
        self._pending: set[asyncio.Future[Any]] = set()
        self._back = asyncio.Event()
        self._back.set()

    def answer(self, reference: Any) -> "asyncio.Future[Any]":
        """An awaitable of an actor's answer, which fails with EngineDied when Ray is lost.

        Its error is marked as retrieved: asyncio would log that of an abandoned call.
        """
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending.add(answer)

        def answered(call: "asyncio.Future[Any]") -> None:
            self._pending.discard(answer)
            error = call.exception()
            if answer.done():
                return
            if error is None:
                answer.set_result(call.result())
            else:
                answer.set_exception(error)

        asyncio.wrap_future(reference.future()).add_done_callback(answered)
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self.lost is not None:
            answer.set_exception(EngineDied(self.lost))
        return answer

    def check(self) -> None:
        """Before anything is asked of Ray. Raises EngineDied."""
        if self.lost is not None:
            raise EngineDied(self.lost)

    async def connected(self) -> None:
        """Until there is a Ray."""
        await self._back.wait()

    def lose(self, reason: str) -> None:
        self.lost = reason
        self._back.clear()
        pending, self._pending = self._pending, set()
        for answer in pending:
            if not answer.done():
                answer.set_exception(EngineDied(reason))

    def restore(self) -> None:
        self.lost = None
        self._back.set()
