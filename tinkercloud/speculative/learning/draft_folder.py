"""The drafts of a policy as files: a folder for each version, and aliases that move in one go.

    ROOT/draft-000007/          one version, never changed once it has its name
    ROOT/draft-000007/draft.json   its parent, and notes
    ROOT/latest, ROOT/best      files of one line: the version that the alias names

`latest` was trained last, `best` passed the gate last and is drafted with.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tinkercloud import flushing
from tinkercloud.errors import NotFound

ALIASES = ("best", "latest")
_NOTES = "draft.json"
_PREFIX = "draft-"


class DraftFolder:
    """One writer at a time. Readers see a version whole or not at all."""

    def __init__(self, root: Path, keep: int = 8):
        """keep: how many of the newest versions stay, in addition to those that an alias names and
        their parents, to which a rollback would go."""
        self.root, self._keep = root, max(keep, 1)
        root.mkdir(parents=True, exist_ok=True)

    def versions(self) -> list[str]:
        """Oldest first."""
        return sorted(path.name for path in self.root.glob(f"{_PREFIX}*") if path.is_dir())

    def resolve(self, name: str) -> str:
        """The version of an alias or of a version's own name. Raises NotFound."""
        version = name
        if name in ALIASES:
            try:
                version = (self.root / name).read_text(encoding="utf-8").strip()
            except FileNotFoundError:
                raise NotFound(f"no draft is {name!r} yet") from None
        if version not in self.versions():
            raise NotFound(f"there is no draft {version!r}")
        return version

    def find(self, name: str) -> str | None:
        """As `resolve`; None where there is none."""
        try:
            return self.resolve(name)
        except NotFound:
            return None

    def path(self, name: str) -> Path:
        return self.root / self.resolve(name)

    def notes(self, name: str) -> dict[str, Any]:
        return json.loads((self.path(name) / _NOTES).read_text(encoding="utf-8"))

    def publish(self, write: Callable[[Path], None], notes: Mapping[str, Any]) -> str:
        """A new version, written by `write` into a folder that has no name yet, becomes `latest`.
        Its parent is the `best` one."""
        version = self._next_name()
        unfinished = self.root / f".{version}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        write(unfinished)
        text = json.dumps({**notes, "parent": self.find("best")}, indent=2)
        (unfinished / _NOTES).write_text(text, encoding="utf-8")
        for path in unfinished.iterdir():
            flushing.flush(path)
        unfinished.rename(self.root / version)
        flushing.flush(self.root)
        self.use("latest", version)
        self._prune()
        return version

    def use(self, alias: str, name: str) -> None:
        """Point an alias at a version; readers get the old one or the new one."""
        if alias not in ALIASES:
            raise NotFound(f"no alias {alias!r}; there are {', '.join(ALIASES)}")
        version = self.resolve(name)
        unfinished = self.root / f".{alias}"
        unfinished.write_text(f"{version}\n", encoding="utf-8")
        flushing.flush(unfinished)
        os.replace(unfinished, self.root / alias)
        flushing.flush(self.root)

    def rollback(self, alias: str = "best") -> str:
        """Point an alias at its version's parent; the name of that. Raises NotFound without one."""
        parent = self.notes(alias)["parent"]
        if parent is None:
            raise NotFound(f"{self.resolve(alias)} has no draft before it")
        self.use(alias, parent)
        return parent

    def _next_name(self) -> str:
        last = max((int(v.removeprefix(_PREFIX)) for v in self.versions()), default=0)
        return f"{_PREFIX}{last + 1:06d}"

    def _prune(self) -> None:
        held = {name for alias in ALIASES if (name := self.find(alias)) is not None}
        held |= {parent for name in held if (parent := self.notes(name)["parent"]) is not None}
        for version in self.versions()[: -self._keep]:
            if version not in held:
                shutil.rmtree(self.root / version)
