"""Restore points: what a model is restored from when its ranks die.

A checkpoint's folder belongs to the caller, who may rename, replace or delete it. So its files are
hard-linked (or copied, where links are not possible) into a folder of ours, the model's restore
point until its next checkpoint. On one file system no bytes are written twice.
"""

import asyncio
import json
import os
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from tinkercloud.core.types import LoraSpec
from tinkercloud.errors import UserError

STATE_FILE = "training_state.json"


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """folder None: the new model. with_optimizer: how to load the folder. label: for users."""

    folder: Path | None
    with_optimizer: bool
    label: str


@dataclass(slots=True)
class ModelRecord:
    """A model of a train group, as the API process knows it.

    unsaved: trained since the point, acknowledged or underway when the ranks died. gradient: one is
    accumulated, which no checkpoint holds. rewound: the text with which its next operation fails.
    lost: it could not be restored. weights: a new object for each change of them. weights_lock: for
    who changes them, or needs them unchanged."""

    spec: LoraSpec
    point: RestorePoint
    unsaved: bool = False
    gradient: bool = False
    rewound: str | None = None
    lost: bool = False
    weights: object = field(default_factory=object)
    weights_lock: asyncio.Lock = field(default_factory=asyncio.Lock)


BEGINNING = RestorePoint(None, False, "its beginning: no checkpoint of it was saved")


class RestorePoints:
    """The restore points of one group's models, below one folder."""

    def __init__(self, root: Path):
        self._root = root

    async def keep(self, model_id: str, checkpoint: Path, *, with_optimizer: bool) -> RestorePoint:
        """Link a checkpoint's files."""
        target = self._of(model_id) / uuid.uuid4().hex[:12]
        await asyncio.to_thread(_link_all, checkpoint, target)
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


def link_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Into a new folder. Raises UserError when a file is missing."""
    target.mkdir(parents=True)
    for name in names:
        if not (source / name).is_file():
            raise UserError(f"the checkpoint has no {name}")
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, target / name)
        except OSError:  # another file system, or one without links
            shutil.copy2(source / name, target / name)


def _link_all(source: Path, target: Path) -> None:
    files = [path for path in source.rglob("*") if path.is_file()]
    link_files(source, target, [str(path.relative_to(source)) for path in files])


def _steps(folder: Path) -> int:
    try:
        return int(json.loads((folder / STATE_FILE).read_text())["num_steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
