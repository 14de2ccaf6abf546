"""What a model comes back from when its ranks die.

A checkpoint's own folder is the caller's, who renames, replaces and deletes it. So its files are
hard-linked (copied where they cannot be) into a folder of ours, which is the model's restore point
until the next one. No bytes are written twice on one file system.
"""

import asyncio
import json
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from tinkercloud.core.types import LoraSpec

STATE_FILE = "training_state.json"


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """folder None: the beginning. with_optimizer: how to load the folder."""

    folder: Path | None
    with_optimizer: bool
    label: str


@dataclass(slots=True)
class KnownModel:
    """unsaved: training since the point, acknowledged or underway when the ranks died.
    gradient: something is accumulated, which no checkpoint holds. rewound: what its next operation
    must be told. lost: it could not be brought back."""

    spec: LoraSpec
    point: RestorePoint
    unsaved: bool = False
    gradient: bool = False
    rewound: str | None = None
    lost: bool = False


BEGINNING = RestorePoint(None, False, "its beginning: no checkpoint of it was saved")


class RestorePoints:
    """The points of one group's models, below one folder."""

    def __init__(self, root: Path):
        self._root = root

    async def keep(self, model_id: str, checkpoint: Path, *, with_optimizer: bool) -> RestorePoint:
        """Take over a checkpoint's files."""
        target = self._of(model_id) / uuid.uuid4().hex[:12]
        await asyncio.to_thread(_link, checkpoint, target)
        steps = await asyncio.to_thread(_steps, target)
        name = "/".join(checkpoint.parts[-3:-1])
        at = f"step {steps}" if with_optimizer else "weights alone"
        return RestorePoint(target, with_optimizer, f"checkpoint {name} ({at})")

    async def drop(self, point: RestorePoint) -> None:
        if point.folder is not None:
            await asyncio.to_thread(shutil.rmtree, point.folder, ignore_errors=True)

    async def forget(self, model_id: str) -> None:
        await asyncio.to_thread(shutil.rmtree, self._of(model_id), ignore_errors=True)

    async def forget_all(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)

    def _of(self, model_id: str) -> Path:
        return self._root / quote(model_id, safe="")


def link_tree(source: Path, target: Path) -> None:
    """target must not exist; its parents are made."""
    _link(source, target)


def _link(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for path in source.rglob("*"):
        place = target / path.relative_to(source)
        if path.is_dir():
            place.mkdir(parents=True, exist_ok=True)
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, place)
        except OSError:  # another file system, or one without links
            shutil.copy2(path, place)


def _steps(folder: Path) -> int:
    try:
        return int(json.loads((folder / STATE_FILE).read_text())["num_steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
