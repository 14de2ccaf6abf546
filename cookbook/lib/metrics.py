"""The figures of a run, a line of JSON for each step, and the place to go on from."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from lib.evaluation import Evaluation
from tinker_gmi.connection.errors import TinkerError
from tinker_gmi.run_metrics import RunMetrics

T = TypeVar("T")


class Metrics:
    """NAME.jsonl in a folder (None: nothing is written). A run that was stopped goes on behind the
    last step whose weights were saved when it is started again with the same folder.

    first_step: the number of steps that are done. state: what `saved` was given last, None where
    `is_new`.
    """

    def __init__(self, folder: Path | None, name: str):
        self.name = name
        self._path = None if folder is None else folder / f"{name}.jsonl"
        self._shown: tuple[RunMetrics, str] | None = None
        self.lines: list[dict[str, Any]] = []
        self.first_step, self.state = 0, None
        if self._path is None or not self._path.is_file():
            return
        lines = [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]
        saved = [i for i, line in enumerate(lines) if "state" in line]
        if saved:
            self.lines = lines[: saved[-1] + 1]
            self.first_step, self.state = self.lines[-1]["step"], self.lines[-1]["state"]
            print(f"going on behind step {self.first_step} of {self._path}", flush=True)
        self._write("w", self.lines)

    @property
    def is_new(self) -> bool:
        """Whether no earlier run goes on."""
        return self.state is None

    def left(self, batches: Iterator[T], num_steps: int) -> Iterator[tuple[int, T]]:
        """(step, its batch), step from 1 on, of those that are not done; each step has the batch
        that it has in a run that was never stopped."""
        for step in range(1, num_steps + 1):
            batch = next(batches)
            if step > self.first_step:
                yield step, batch

    def show(self, console: RunMetrics, run_id: str) -> None:
        """In the server's console, of this run: what is added, and what an earlier run has left."""
        self._shown = console, run_id
        self._show(self.lines)

    def add(self, step: int, **figures: Any) -> None:
        """step: from 1 on."""
        self.lines.append({"step": step, **figures})
        self._write("a", self.lines[-1:])
        self._show(self.lines[-1:])

    def saved(self, step: int, path: str | list[str]) -> None:
        """All steps up to this one are in the saved weights at path, of several models at paths."""
        self.add(step, state=path)

    def begun(self, before: Evaluation) -> None:
        """What a run that goes on could not judge again."""
        self.add(0, before=asdict(before))

    @property
    def before(self) -> Evaluation:
        """What `begun` was given, by this run or by the one before it."""
        return Evaluation(**self.values("before")[0])

    def values(self, name: str) -> list[Any]:
        """Of all steps, those before a stop included."""
        return [line[name] for line in self.lines if name in line]

    def _show(self, lines: list[dict[str, Any]]) -> None:
        if self._shown is None:
            return
        console, run_id = self._shown
        try:
            console.report_many(run_id, [(line["step"], _numbers(line)) for line in lines])
        except TinkerError as error:  # another server than ours: the run goes on without
            print(f"the console does not show the figures: {error}", flush=True)
            self._shown = None

    def _write(self, mode: str, lines: list[dict[str, Any]]) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open(mode, encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    return {n: v for n, v in line.items() if n != "step" and isinstance(v, int | float)}
