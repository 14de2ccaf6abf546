"""The figures of a run, a line of JSON for each step, and the place to go on from."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from lib.evaluation import Evaluation

T = TypeVar("T")


class Metrics:
    """NAME.jsonl in a folder (None: nothing is written). A run that was stopped goes on behind the
    last step whose weights were saved when it is started again with the same folder.

    first_step: the number of steps that are done. state: what to load, None where `is_new`.
    """

    def __init__(self, folder: Path | None, name: str):
        self.name = name
        self._path = None if folder is None else folder / f"{name}.jsonl"
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

    def add(self, step: int, **figures: Any) -> None:
        """step: from 1 on."""
        self.lines.append({"step": step, **figures})
        self._write("a", self.lines[-1:])

    def saved(self, step: int, path: str) -> None:
        """All steps up to this one are in the saved weights at path."""
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

    def _write(self, mode: str, lines: list[dict[str, Any]]) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open(mode, encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
