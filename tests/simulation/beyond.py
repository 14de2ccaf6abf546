"""Awaits of services, core and storage, and flushes, at which no schedule can crash, and why."""

from collections.abc import Mapping

SPANS = "spans go to a collector elsewhere, which no schedule names"
WEBHOOK = "needs the network; `patches` has a webhook of its own"
SHRINK = "a file with megabytes of deleted rows"
SAME_BITS = "bits never differ on the simulated engine"
MANY_NAMES = "257 names of weights"
ENDED = "its last word came as it ended, so it is not waited for"
STOPPED = "who leaves is stopped in the wait for a chunk, where the samples are ended"
DROPPED = "what is dropped is only forgotten, which waits for nothing"
NOT_KEPT = "of backends that bring nothing back, whose requests are not kept"
RESULTS = "results beyond result_bytes go; the invariants read what each operation gave"
FOR_TESTS = "for tests that wait until all is done; no request does"
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
    ("", "async with asyncio.timeout"): "neither entering nor leaving a timeout waits",
    ("services/chats/model_names.py", "self._sampling.release("): MANY_NAMES,
    ("services/chats/model_names.py", "self._kept("): MANY_NAMES,
    ("services/models/sampling_service.py", "def release"): MANY_NAMES,
    ("services/models/sampling_service.py", "self._versions.drop("): DROPPED,
    ("services/models/sampler_versions.py", "self._versions.drop("): DROPPED,
    ("services/models/model_service.py", "def freed"): FOR_TESTS,
    ("services/recovery/snapshots.py", "def settled"): FOR_TESTS,
    ("services/chats/chat_service.py", "async with aclosing("): STOPPED,
    ("services/chats/text_completion_service.py", "async with aclosing("): STOPPED,
    ("services/chats/sample_stream.py", "self.drawn = await task"): ENDED,
    ("services/chats/text_completion_service.py", "await readers[place]"): ENDED,
    ("core/lanes.py", "def run"): NOT_KEPT,
    ("core/task_manager.py", "def close: self._finish(pending, STOPPED)"): NOT_KEPT,
    ("storage/futures.py", "def keep_within: self._database.all("): RESULTS,
    ("storage/futures.py", "def keep_within: self._database.write("): RESULTS,
    ("storage/database.py", "def _write_until_closed: self._commit([write])"): SHRINK,
    (
        "services/recovery/recovery.py",
        "self._journal.next_after(*key, 0)",
    ): "damaged snapshots: the "
    "simulated disk loses what was not flushed, and keeps the rest as it is",
    ("services/common/body_parser.py", ""): "bodies from 64 kB on, in real processes",
    ("services/container.py", "self.spans.close()"): SPANS,
    ("services/observability/span_export.py", ""): SPANS,
    ("services/accounts/unused_sessions.py", '"interrupted"'): "30 days without a request",
    ("services/recovery/recovery.py", "self._note_difference("): SAME_BITS,
    ("services/recovery/recovery.py", "def _note_difference"): SAME_BITS,
    ("services/runs/replay.py", "def _deviation"): SAME_BITS,
    ("services/runs/replay.py", "self._deviation("): SAME_BITS,
}
"""By (file, "def" of a function, a part of the awaiting line, or both); "": any file, or all of
it."""

BACKUPS = "run by no schedule; `test_backup_ends` ends `backup` and `restore` at each flush"
KEYS = "by commands on keys: their connection is real"
FLUSHES_BEYOND: Mapping[str, str] = {
    "tinkercloud/services/checkpoints/backups.py": BACKUPS,
    **dict.fromkeys(("key_labels", "INSERT keys", "UPDATE keys", "DELETE keys"), KEYS),
}
"""By a part of the flush's name."""


def reason(file: str, function: str, line: str) -> str | None:
    """None: schedules can come there."""
    for (name, part), why in BEYOND.items():
        where, _, text = part.rpartition(": ")
        if name and file != f"tinkercloud/{name}":
            continue
        if where in ("", f"def {function}") and (text == f"def {function}" or text in line):
            return why
    return None
