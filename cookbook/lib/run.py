"""What a recipe leaves: its curve, the held-out results before and after, the saved weights."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from lib.evaluation import Evaluation

Draw = Callable[[ModuleType, Path], Path]
"""Given lib.plot and where the picture goes, which it returns."""


@dataclass(frozen=True)
class Run:
    """values[i] belongs to step i + 1, spread[i] is its standard error where there is one."""

    name: str  # "sft" | "rl" | "agent"
    measure: str  # what the values are
    values: list[float]
    spread: list[float] | None
    before: Evaluation
    after: Evaluation
    state_path: str  # tinker://..., loads with create_training_client_from_state

    def save(self, folder: Path) -> Path:
        return write_figures(folder, self.name, asdict(self))


def leave(folder: Path | None, name: str, figures: Any, draw: Draw) -> None:
    """NAME.json and NAME.png in the folder, and where they are; nothing where there is none."""
    if folder is None:
        return
    # Here, so that a recipe without a picture needs no matplotlib.
    from lib import plot

    print(f"figures: {write_figures(folder, name, figures)}", flush=True)
    print(f"picture: {draw(plot, folder / f'{name}.png')}", flush=True)


def write_figures(folder: Path, name: str, figures: Any) -> Path:
    """NAME.json in the folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(figures, indent=1, ensure_ascii=False), encoding="utf-8")
    return path
