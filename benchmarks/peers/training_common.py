"""What every contender of the training benchmark does the same: reads its job, times, reports.

A contender is a process of its own (`lib.peers.Script`). This file imports neither our package nor
a peer's, so that a peer's environment needs only its own.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.peer_script import Replies, read_job


@dataclass(frozen=True)
class Job:
    """model: a Hugging Face folder. adapter: the start, in PEFT's format. batch: what one step
    trains on, lists of token ids; each is one longer than the tokens it trains on. warm_up: a small
    batch of before. variant: what the contender calls its settings. dtype: of the frozen weights;
    adapters are float32. peers: the folder with their environments. save_to: where the trained
    adapter goes."""

    model: str
    adapter: str
    batch: list[list[int]]
    warm_up: list[list[int]]
    repeats: int
    threads: int
    learning_rate: float
    variant: str
    dtype: str
    peers: str
    save_to: str


def start() -> tuple[Job, Replies]:
    """First in a contender's script: from here on libraries cannot print among its replies."""
    replies = Replies()
    return Job(**read_job()), replies


def memory_bytes(field: str, pids: Sequence[int | str] = ("self",)) -> int:
    """Of these processes together: VmRSS now, VmHWM the most since `forget_peak` (of each alone, so
    their sum is at most what they held at one time)."""
    return sum(_memory_bytes(field, pid) for pid in pids)


def _memory_bytes(field: str, pid: int | str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"the kernel does not tell {field} of process {pid}")


def forget_peak(pids: Sequence[int | str] = ("self",)) -> None:
    """The kernel's peak starts again from what is resident now; loading is not training."""
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="utf-8")


class Record:
    """Takes the figures of a contender's steps, from `begin` to `end`. Made when all is loaded and
    warm; pids: the processes whose memory counts."""

    def __init__(self, replies: Replies, pids: Sequence[int | str] = ("self",)):
        self._replies, self._pids = replies, pids
        self._loaded = memory_bytes("VmRSS", pids)
        self._start, self._peak = 0.0, 0
        self._seconds: list[float] = []
        self._losses: list[float] = []
        forget_peak(pids)

    def begin(self) -> None:
        self._start = time.perf_counter()

    def end(self, loss: float) -> None:
        """loss: summed over all tokens, before the step's update."""
        self._seconds.append(time.perf_counter() - self._start)
        self._peak = memory_bytes("VmHWM", self._pids)
        self._losses.append(loss)

    def send(self) -> None:
        """The reply that the benchmark reads."""
        self._replies.send(
            seconds=self._seconds,
            losses=self._losses,
            loaded_bytes=self._loaded,
            peak_bytes=self._peak,
        )


def run(
    job: Job,
    replies: Replies,
    step: Callable[[list[list[int]]], float],
    save: Callable[[Path], None],
) -> None:
    """step(batch) -> the summed loss before its update. The caller has warmed up, and dropped those
    gradients: the first step starts from the job's adapter."""
    record = Record(replies)
    for _ in range(job.repeats):
        record.begin()
        record.end(step(job.batch))
    save(Path(job.save_to))
    record.send()
