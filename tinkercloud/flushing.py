"""Onto the disk: what is flushed is there even after a power cut."""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """A file's content, or the names in a folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_folder(folder: Path) -> None:
    """The content of its files, then their names: a name that lasts leads to the whole file."""
    for path in (*folder.iterdir(), folder):
        flush(path)
