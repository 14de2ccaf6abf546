"""Results: waiting for them, showing them, forgetting them."""

from tinker_gmi.types import CleanupFuturesRequest, FutureStatusResponse, TryAgainResponse
from tinkercloud.backends.base import Backend
from tinkercloud.core.task_manager import TaskManager
from tinkercloud.services.recovery.recovery import Recovery
from tinkercloud.services.results.result_answer import JsonWriter, ResultAnswer, as_kept
from tinkercloud.storage.futures import FuturesStorage


class FutureService:
    """hold_s: the longest wait of one call."""

    def __init__(
        self,
        backend: Backend,
        recovery: Recovery,
        tasks: TaskManager,
        futures: FuturesStorage,
        hold_s: float,
    ):
        self._backend = backend
        self._recovery = recovery
        self._tasks = tasks
        self._futures = futures
        self._hold_s = hold_s
        self._json = JsonWriter()

    async def wait(self, user: str, request_id: str, *, protobuf: bool) -> ResultAnswer | None:
        """None: still pending after hold_s. protobuf False: for a client that reads JSON only.

        Raises FutureUnknown.
        """
        outcome = await self._tasks.wait(request_id, user, self._hold_s)
        if outcome is None:
            return None
        return as_kept(outcome) if protobuf else self._json.plain(request_id, outcome)

    def try_again(self, request_id: str) -> TryAgainResponse:
        """The answer to a poll of a pending request: whether it waits for capacity or for its
        model's return, or its result for room on the disk."""
        reason, subject = self._tasks.delay_of(request_id), self._tasks.subject_of(request_id)
        if reason is None and subject is not None:
            reason = self._backend.queue_state(subject) or self._recovery.delay_of(subject)
        if reason is None:
            return TryAgainResponse(request_id=request_id)
        return TryAgainResponse(
            request_id=request_id, queue_state="paused_capacity", queue_state_reason=reason
        )

    async def status(
        self, user: str, request_id: str, wait_s: float
    ) -> FutureStatusResponse | ResultAnswer:
        """The same as one JSON object, whatever the result's own form."""
        outcome = await self._tasks.wait(request_id, user, min(wait_s, self._hold_s))
        if outcome is None:
            return FutureStatusResponse(request_id=request_id, status="pending")
        return self._json.status(request_id, outcome)

    async def cleanup(self, user: str, body: CleanupFuturesRequest) -> int:
        """How many finished results were forgotten."""
        return await self._futures.delete_finished(user, body.request_ids, body.model_id)
