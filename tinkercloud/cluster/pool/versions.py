"""Published weights: immutable, on disk, served by any engine that holds or can load them.

An adapter's version is a PEFT folder; engines hold several of these alongside the base. Any other
is a Hugging Face folder with all weights; engines hold one of these at a time.
"""

import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from tinkercloud.cluster.rollout.manager import BASE


@dataclass(frozen=True, slots=True)
class Version:
    """folder None: the base itself. owner: the full-parameter model whose pool serves it while it
    is open."""

    id: str
    base_model: str
    folder: Path | None = None
    is_adapter: bool = False
    owner: str | None = None

    @property
    def weights(self) -> str:
        """The name of the weights that engines must hold to serve it."""
        return BASE if self.folder is None or self.is_adapter else self.id

    @property
    def adapter(self) -> str | None:
        return self.id if self.is_adapter else None


def new_id() -> str:
    """Unique, also among servers."""
    return f"v-{uuid.uuid4().hex[:16]}"


class VersionFolders:
    """The folders of all versions. `clear` removes those of an earlier server: nobody has their
    ids."""

    def __init__(self, root: Path):
        self._root = root

    def clear(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

    def place(self, version_id: str) -> Path:
        return self._root / version_id

    def make(self, version_id: str) -> Path:
        folder = self.place(version_id)
        folder.mkdir(parents=True)
        return folder


def remove(folder: Path | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
