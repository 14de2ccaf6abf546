"""TRL's GRPO, as a process of its own (`rl_grpo.py`) in the peer's environment."""

import json
import subprocess
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path

from peers.rl_common import Diary, Work
from peers.sampling_common import Unavailable, peer_environment, python_of

SCRIPT = Path(__file__).resolve().with_name("rl_grpo.py")


def trl(peers: Path, work: Work, limit_s: float) -> Diary:
    """All steps, or what was done of them in `limit_s`. Raises Unavailable."""
    python, diary = python_of(peers, "trl"), Diary()
    with tempfile.TemporaryDirectory() as scratch, (Path(scratch) / "log").open("w+") as log:
        told = Path(scratch) / "work.json"
        told.write_text(json.dumps(asdict(work) | {"scratch": scratch}), encoding="utf-8")
        process = subprocess.Popen(
            [python, "-W", "ignore", SCRIPT, told],
            env=peer_environment(),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        stopped = read_all(process, diary, limit_s)
        if stopped:
            diary.stop(limit_s)
        elif process.returncode != 0:
            log.seek(0)
            last = (log.read().strip().splitlines() or ["it said nothing"])[-1]
            raise Unavailable(f"failed: {last[:200]}")
    return diary


def read_all(process: "subprocess.Popen[str]", diary: Diary, limit_s: float) -> bool:
    """What the process says goes into the diary, until its end; whether the limit ended it."""
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        process.kill()

    late = threading.Timer(limit_s, stop)
    late.start()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            note(json.loads(line), diary)
        process.wait()
    finally:
        late.cancel()
        process.kill()
    return stopped.is_set()


def note(told: dict, diary: Diary) -> None:
    """A phase that begins or has ended, a step's end, or a fault."""
    if "begins" in told:
        diary.begin(told["begins"])
    diary.current |= told.get("phases", {})
    diary.fault = told.get("fault", diary.fault)
    if told.get("step"):
        diary.end_step()
