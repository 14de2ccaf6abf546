"""TRL's GRPO, as a process of its own (`rl_grpo.py`) in the peer's environment."""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.lib.peers import LimitReached, Script, python_of
from benchmarks.peers.rl_common import StepLog, Work


def trl(peers: Path, work: Work, limit_s: float) -> StepLog:
    """All steps, or what was done of them in `limit_s`. Raises Unavailable."""
    script, log = Script("rl_grpo", python_of(peers, "trl")), StepLog()
    with tempfile.TemporaryDirectory() as scratch:
        job = asdict(work) | {"scratch": scratch}
        try:
            script.run(job, limit_s, lambda reply: note(reply, log))
        except LimitReached:
            log.stop(limit_s)
    return log


def note(reply: dict[str, Any], log: StepLog) -> None:
    """A phase that begins or has ended, a step's end, or a fault."""
    if "begins" in reply:
        log.begin(reply["begins"])
    log.current |= reply.get("phases", {})
    log.fault = reply.get("fault", log.fault)
    if reply.get("step"):
        log.end_step()
