"""What the console shows of the server as it is just now, for JSON."""

import time
from typing import Any

from tinkercloud.backends.base import Backend
from tinkercloud.core.task_manager import TaskManager
from tinkercloud.services.observability.metrics_service import MetricsService

MAX_QUEUES = 200


class LiveView:
    def __init__(self, metrics: MetricsService, tasks: TaskManager, backend: Backend):
        self._metrics = metrics
        self._tasks = tasks
        self._backend = backend

    def snapshot(self, user: str | None) -> dict[str, Any]:
        """user: whose numbers; None: the whole server's, with what its engine says."""
        view: dict[str, Any] = {
            "time": time.time(),
            "whole_server": user is None,
            "metrics": self._metrics.readings(user),
            "queues": self._queues(user)[:MAX_QUEUES],
        }
        if user is None:
            view |= {
                "trouble": self._backend.trouble(),
                "speculation": self._backend.speculation(),
            }
        return view

    def _queues(self, user: str | None) -> list[dict[str, Any]]:
        """Operations that have not ended, by user, model (or sampler) and kind; what has waited
        longest first."""
        now = time.time()
        queues: dict[tuple[str, str, str], dict[str, Any]] = {}
        for pending in self._tasks.pending():
            ticket = pending.ticket
            if user not in (None, ticket.user):
                continue
            owner = ticket.model_id or ticket.sampler_id or ""
            key = (ticket.user, owner, ticket.kind)
            queue = queues.setdefault(
                key,
                dict(zip(("user", "owner", "kind"), key, strict=True))
                | {"waiting": 0, "running": 0, "oldest_s": 0.0},
            )
            queue["waiting" if pending.started_at is None else "running"] += 1
            queue["oldest_s"] = max(queue["oldest_s"], now - pending.accepted_at)
        return sorted(queues.values(), key=lambda queue: -queue["oldest_s"])
