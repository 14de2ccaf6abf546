"""A disk that forgets. Files lie in a real folder (of memory); what was flushed is kept beside.

A name or a write is durable once the folder or the file was flushed after it. A power cut keeps an
arbitrary part of the rest: each change of a name, each write, whole, torn at 512 bytes, or not at
all. When a process is killed everything stays, flushed or not, and the next one begins on a copy:
whatever the dead one still does, reaches nobody.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

BLOCK_BYTES = 512


@dataclass(eq=False)
class File:
    """synced: as it was last flushed. writes: those since then of a file that tells them
    (SQLite's), in order; data None: cut to that length. last: what one held that lost its name."""

    inode: int
    synced: bytearray = field(default_factory=bytearray)
    writes: list[tuple[int, bytes | None]] = field(default_factory=list)
    tells_writes: bool = False
    last: bytes | None = None

    def sync(self, content: bytes | None) -> None:
        """content: of a file that does not tell its writes."""
        if content is not None:
            self.synced = bytearray(content)
        for offset, data in self.writes:
            apply_write(self.synced, offset, data)
        self.writes.clear()


@dataclass(eq=False)
class Folder:
    """entries: as a living process sees them; durable: flushed; changes: (name gone, name new,
    node) since then."""

    inode: int
    entries: dict[str, "Node"] = field(default_factory=dict)
    durable: dict[str, "Node"] = field(default_factory=dict)
    changes: list[tuple[str | None, str | None, "Node | None"]] = field(default_factory=list)

    def change(self, gone: str | None, new: str | None, node: "Node | None") -> None:
        self.changes.append((gone, new, node))
        apply_change(self.entries, gone, new, node)

    def sync(self) -> None:
        for change in self.changes:
            apply_change(self.durable, *change)
        self.changes.clear()


Node = File | Folder


def apply_write(content: bytearray, offset: int, data: bytes | None) -> None:
    if data is None:
        del content[offset:]
        return
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


def apply_change(
    entries: dict[str, Node], gone: str | None, new: str | None, node: Node | None
) -> None:
    if gone is not None:
        entries.pop(gone, None)
    if new is not None and node is not None:
        entries[new] = node


class Disk:
    """point: called with a label before and after each change and flush; it may end the process, or
    raise OSError. `folder` is where the living server's data are."""

    def __init__(self, place: Path, point: Callable[[str, Path], None]):
        self._place = place
        self._point = point
        self._number = 0
        self._inodes: dict[int, Node] = {}
        self._prefix = f"{place}/"
        self._asleep = False  # what it does itself is no doing of a process
        self.folder = place / "0"
        self.root = Folder(0)

    def begin_from(self, image: Path) -> None:
        """A copy of that folder, durable."""
        with self._sleeping():
            shutil.copytree(image, self.folder)
            self._adopt()

    @contextmanager
    def _sleeping(self) -> Iterator[None]:
        self._asleep = True
        try:
            yield
        finally:
            self._asleep = False

    def _adopt(self) -> None:
        """Everything that lies there is durable."""
        self._inodes = {}
        self.root = self._adopted(self.folder)

    def _adopted(self, path: Path) -> Folder:
        folder = Folder(path.stat().st_ino)
        self._inodes[folder.inode] = folder
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            node: Node
            if entry.is_dir():
                node = self._adopted(Path(entry.path))
            elif entry.inode() in self._inodes:  # one more name of a file
                node = self._inodes[entry.inode()]
            else:
                node = File(entry.inode(), bytearray(Path(entry.path).read_bytes()))
                self._inodes[entry.inode()] = node
            folder.entries[entry.name] = folder.durable[entry.name] = node
        return folder

    # ---- what a living process does; each comes with the real thing done between two points

    def holds(self, path: Path) -> bool:
        return not self._asleep and str(path).startswith(self._prefix)

    def close(self) -> None:
        """Nothing is watched any more."""
        self._asleep = True

    def point(self, label: str, path: Path) -> None:
        self._point(label, path)

    def made(self, path: Path) -> None:
        """A file, a folder or a hard link is there now under this name."""
        inode = path.stat().st_ino
        node = self._inodes.get(inode)
        if node is None:
            node = Folder(inode) if path.is_dir() else File(inode)
            self._inodes[inode] = node
        self._parent(path).change(None, path.name, node)

    def going(self, path: Path) -> None:
        """This name is about to be removed."""
        node = self._inodes.get(path.lstat().st_ino)
        if isinstance(node, File) and not node.tells_writes:
            node.last = path.read_bytes()

    def gone(self, path: Path) -> None:
        self._parent(path).change(path.name, None, None)

    def moved(self, source: Path, target: Path) -> None:
        node = self._inodes[target.stat().st_ino]
        if source.parent == target.parent:
            self._parent(target).change(source.name, target.name, node)
        else:
            self._parent(target).change(None, target.name, node)
            self._parent(source).change(source.name, None, None)

    def synced(self, path: Path) -> None:
        node = self._inodes.get(path.stat().st_ino)
        if isinstance(node, Folder):
            node.sync()
        elif node is not None:
            node.sync(None if node.tells_writes else path.read_bytes())

    def file(self, path: Path) -> File:
        """Of SQLite: from now on it tells what it writes."""
        node = self._inodes.get(path.stat().st_ino)
        if node is None:
            self.made(path)
            node = self._inodes[path.stat().st_ino]
        assert isinstance(node, File)
        node.tells_writes = True
        return node

    def _parent(self, path: Path) -> Folder:
        node = self._inodes[path.parent.stat().st_ino]
        assert isinstance(node, Folder)
        return node

    # ---- the end of a process

    def after_kill(self) -> None:
        """The data folder of the next server, when only the process ended."""
        old = self._next_folder()
        copies: dict[Node, Path] = {}
        with self._sleeping():
            self._copy(self.root, old, self.folder, copies)
            shutil.rmtree(old)
        for node, path in copies.items():
            node.inode = path.stat().st_ino
        self._inodes = {node.inode: node for node in copies}

    def _copy(self, folder: Folder, old: Path, new: Path, copies: dict[Node, Path]) -> None:
        os.mkdir(new, 0o700)
        copies[folder] = new
        for name, node in folder.entries.items():
            if isinstance(node, Folder):
                self._copy(node, old / name, new / name, copies)
            elif node in copies:  # one more name of a file
                os.link(copies[node], new / name)
            else:
                shutil.copyfile(old / name, new / name)
                copies[node] = new / name

    def _contents(self) -> dict[int, bytes]:
        """Of all files that have a name, by inode."""
        contents: dict[int, bytes] = {}
        for folder, _, names in os.walk(self.folder):
            for name in names:
                if not name.endswith("-shm"):
                    path = Path(folder, name)
                    contents[path.stat().st_ino] = path.read_bytes()
        return contents

    def after_power_cut(self, choices: random.Random) -> None:
        """The data folder of the next server: what was flushed, and a part of the rest."""
        survival = Survival(choices, self._contents())
        old = self._next_folder()
        with self._sleeping():
            survival.write_folder(self.root, self.folder)
            shutil.rmtree(old)
            self._adopt()

    def _next_folder(self) -> Path:
        """The one until now."""
        old = self.folder
        self._number += 1
        self.folder = self._place / str(self._number)
        return old


class Survival:
    """What of a disk survives a power cut. contents: of files, as the last process saw them."""

    def __init__(self, choices: random.Random, contents: dict[int, bytes]):
        self._choices = choices
        self._contents = contents
        # Nothing and everything are likely ends, and hard to meet by single choices.
        self._share = choices.choice((0.0, 0.0, 0.5, 0.5, 0.9, 1.0))
        self._written: dict[int, Path] = {}

    def write_folder(self, folder: Folder, path: Path) -> None:
        os.mkdir(path, 0o700)
        entries = dict(folder.durable)
        for change in folder.changes:
            if self._keeps():
                apply_change(entries, *change)
        for name, node in entries.items():
            if isinstance(node, Folder):
                self.write_folder(node, path / name)
            elif node.inode in self._written:
                os.link(self._written[node.inode], path / name)
            else:
                (path / name).write_bytes(self._content(node))
                self._written[node.inode] = path / name

    def _keeps(self) -> bool:
        return self._choices.random() < self._share

    def _content(self, file: File) -> bytes:
        content = bytearray(file.synced)
        if file.tells_writes:
            for offset, data in file.writes:
                self._maybe_write(content, offset, data)
            return bytes(content)
        latest = self._contents.get(file.inode, file.last)
        if latest is None or latest == file.synced:
            return bytes(content)
        if self._keeps():  # its new length
            del content[len(latest) :]
            content.extend(bytes(len(latest) - len(content)))
        for start in range(0, len(content), BLOCK_BYTES):
            if self._keeps():
                block = latest[start : start + BLOCK_BYTES][: len(content) - start]
                content[start : start + len(block)] = block
        return bytes(content)

    def _maybe_write(self, content: bytearray, offset: int, data: bytes | None) -> None:
        if data is None or len(data) <= BLOCK_BYTES:
            if self._keeps():
                apply_write(content, offset, data)
            return
        if not self._keeps():
            return
        if self._share == 1.0 or self._choices.random() < 0.7:
            apply_write(content, offset, data)
            return
        cut = self._choices.randrange(0, len(data), BLOCK_BYTES)
        apply_write(content, offset, data[:cut])
