"""Completions of samples, for clients that poll once for a whole sampling session; cancellation."""

from tinker_gmi.types import FutureCompletion, FuturesRetrieveRequest, FuturesRetrieveResponse
from tinkercloud.core.completion_log import CLIENT_BLOCK, Completion, CompletionLog, Target
from tinkercloud.core.pending import Pending
from tinkercloud.core.task_manager import TaskManager
from tinkercloud.errors import InvalidRequest
from tinkercloud.storage.futures import FuturesStorage


class CompletionService:
    """hold_s: the longest wait of one call."""

    def __init__(self, tasks: TaskManager, futures: FuturesStorage, hold_s: float):
        self._tasks = tasks
        self._futures = futures
        self._hold_s = hold_s
        self._log = CompletionLog(self._finished_samples)
        tasks.when_finished(self._record)

    async def completions(self, user: str, body: FuturesRetrieveRequest) -> FuturesRetrieveResponse:
        """Which samples of a sampling session have finished since the cursor; whose session it is
        was checked before.

        retrieved_request_ids is without effect: results stay until they expire.
        """
        hold_s = self._hold_s
        if body.timeout is not None:
            if not body.timeout >= 0:  # NaN too
                raise InvalidRequest(f"timeout is {body.timeout}; it must be 0 or more")
            hold_s = min(body.timeout, hold_s)
        target = Target(user, body.target.sampling_session_id, body.target.cloned_sampler_id)
        completions, cursor = await self._log.after(target, body.prev_cursor, hold_s)
        views = [_view(completion) for completion in completions]
        return FuturesRetrieveResponse(completions=views, cursor=cursor)

    async def cancel(self, user: str, request_id: str) -> None:
        """End a pending sample. Raises FutureUnknown, UserError."""
        await self._tasks.cancel(request_id, user)

    def _record(self, pending: Pending) -> None:
        ticket, outcome = pending.ticket, pending.outcome
        assert outcome is not None
        if ticket.sampler_id is not None and ticket.seq_id is not None:
            target = Target.of(ticket.user, ticket.sampler_id, ticket.seq_id)
            self._log.record(
                target, Completion(pending.request_id, outcome.status, len(outcome.body))
            )

    async def _finished_samples(self, target: Target, after: float) -> list[Completion]:
        rows = await self._futures.finished_samples(target.user, target.sampler_id, after)
        return [
            Completion(row["request_id"], row["status"], row["num_bytes"])
            for row in rows
            if row["seq_id"] is not None and row["seq_id"] // CLIENT_BLOCK == target.client
        ]


def _view(completion: Completion) -> FutureCompletion:
    if completion.status == "failed":
        return FutureCompletion(state="failed", request_id=completion.request_id)
    return FutureCompletion(
        state="finished",
        request_id=completion.request_id,
        response_payload_uncompressed_size=completion.num_bytes,
    )
