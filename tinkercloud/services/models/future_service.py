"""Results: waiting for them, showing them, forgetting them."""

import asyncio
import json
from typing import Any

from tinker_gmi.types import CleanupFuturesRequest, FutureStatusResponse, TryAgainResponse
from tinkercloud.backends.base import Backend
from tinkercloud.core.task_manager import TaskManager, is_sampling
from tinkercloud.storage.futures import (
    JSON_TYPE,
    PROTOBUF_TYPE,
    FuturesStorage,
    Outcome,
    failed,
)
from tinkercloud.wire.json_view import (
    is_finite_train_view,
    sample_output_json,
    train_output_json,
)

INLINE_BYTES = 64 * 1024  # larger results are rewritten off the event loop

NOT_JSON = failed(
    "the result has numbers that are not finite (training diverged, or a target is impossible), "
    "and JSON has no form for them; lower the learning rate, or read them with tinker 0.18.1 or "
    "newer, which takes protobuf",
    "user",
)


class FutureService:
    """hold_s: the longest wait of one call."""

    def __init__(
        self, backend: Backend, tasks: TaskManager, futures: FuturesStorage, hold_s: float
    ):
        self._backend = backend
        self._tasks = tasks
        self._futures = futures
        self._hold_s = hold_s

    async def wait(self, user: str, request_id: str, *, protobuf: bool = True) -> Outcome | None:
        """None: still pending after hold_s. protobuf False: for a client that reads JSON only.

        Raises FutureUnknown.
        """
        outcome = await self._tasks.wait(request_id, user, self._hold_s)
        if outcome is None or protobuf or outcome.content_type != PROTOBUF_TYPE:
            return outcome
        if len(outcome.body) <= INLINE_BYTES:
            return _as_json(request_id, outcome)
        return await asyncio.to_thread(_as_json, request_id, outcome)

    def try_again(self, request_id: str) -> TryAgainResponse:
        """The answer to a poll of a pending request: whether it waits for capacity, or its result
        for room on the disk."""
        reason, subject = self._tasks.delay_of(request_id), self._tasks.subject_of(request_id)
        if reason is None and subject is not None:
            reason = self._backend.queue_state(subject)
        if reason is None:
            return TryAgainResponse(request_id=request_id)
        return TryAgainResponse(
            request_id=request_id, queue_state="paused_capacity", queue_state_reason=reason
        )

    async def status(self, user: str, request_id: str, wait_s: float) -> FutureStatusResponse:
        """The same as one JSON object, whatever the result's own form."""
        outcome = await self._tasks.wait(request_id, user, min(wait_s, self._hold_s))
        if outcome is None:
            return FutureStatusResponse(request_id=request_id, status="pending")
        return FutureStatusResponse(
            request_id=request_id, status=outcome.status, result=_json_view(request_id, outcome)
        )

    async def cleanup(self, user: str, body: CleanupFuturesRequest) -> int:
        """How many finished results were forgotten."""
        return await self._futures.delete_finished(user, body.request_ids, body.model_id)


def _as_json(request_id: str, outcome: Outcome) -> Outcome:
    """The same result for a client that reads JSON only (SDKs up to 0.18.0).

    Their types admit null among the log-probabilities of a prompt, and nowhere else that a number
    is not finite.
    """
    view = _json_view(request_id, outcome)
    if not is_sampling(request_id) and not is_finite_train_view(view):
        return NOT_JSON
    return Outcome(outcome.status, JSON_TYPE, json.dumps(view, allow_nan=False).encode())


def _json_view(request_id: str, outcome: Outcome) -> dict[str, Any]:
    if outcome.content_type != PROTOBUF_TYPE:
        return json.loads(outcome.body)
    view = sample_output_json if is_sampling(request_id) else train_output_json
    return view(outcome.body)
