"""Awaits of services, core and storage, and flushes, at which no schedule can crash, and why."""

from collections.abc import Mapping

SPANS = "spans go to a collector elsewhere, which no schedule names"
WEBHOOK = "needs the network; `patches` has a webhook of its own"
SHRINK = "a file with megabytes of deleted rows"
SAME_BITS = "bits never differ on the simulated engine"
BEYOND: Mapping[tuple[str, str], str] = {
    ("storage/threaded_connection.py", ""): "real threads; `sqlite.AsyncConnection` is there",
    ("storage/connections.py", ""): "real files; `sqlite.Connector` opens simulated ones",
    ("storage/owners.py", ""): "of administrators, and no user is one",
    ("storage/database.py", "self._queued((statement,), alone=True)"): SHRINK,
    ("storage/database.py", "before, num_free"): SHRINK,
    ("storage/database.py", "self._writer.execute_fetchall(*statements[0])"): SHRINK,
    ("services/captures/webhook_sender.py", "def resolved"): WEBHOOK,
    ("services/captures/webhook_sender.py", "def _post"): WEBHOOK,
    ("services/captures/webhook_sender.py", "def _answer"): WEBHOOK,
    ("services/chats/model_names.py", "self._sampling.release("): "257 names of weights",
    ("services/common/body_parser.py", ""): "bodies from 64 kB on, in real processes",
    ("services/container.py", "self.spans.close()"): SPANS,
    ("services/observability/span_export.py", ""): SPANS,
    ("services/accounts/unused_sessions.py", '"interrupted"'): "30 days without a request",
    ("services/recovery/recovery.py", "self._note_difference("): SAME_BITS,
    ("services/recovery/recovery.py", "def _note_difference"): SAME_BITS,
    ("services/runs/replay.py", "def _deviation"): SAME_BITS,
    ("services/runs/replay.py", "self._deviation("): SAME_BITS,
}
"""By (file, "def" of a function or a part of the awaiting line); "": all of the file."""

BACKUPS = "run by no schedule; `test_backup_ends` ends `backup` and `restore` at each flush"
KEYS = "by commands on keys: their connection is real"
FLUSHES_BEYOND: Mapping[str, str] = {
    "tinkercloud/services/checkpoints/backups.py": BACKUPS,
    "key_labels": KEYS,
}
"""By a part of the flush's name."""


def reason(file: str, function: str, line: str) -> str | None:
    """None: schedules can come there."""
    of_file = ((part, why) for (name, part), why in BEYOND.items() if file == f"tinkercloud/{name}")
    return next(
        (why for part, why in of_file if part in ("", f"def {function}") or part in line), None
    )
