"""What a run must not take from the machine: clocks, randomness, threads, sockets, and an
unwatched disk. `simulated` replaces them, and puts them back."""

import asyncio
import builtins
import io
import os
import random
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio.to_thread

from tests.simulation.disk import Disk
from tests.simulation.loop import SimulatedLoop
from tinkercloud.services.captures.webhook_sender import WebhookFailed, WebhookSender
from tinkercloud.services.models import sampling_service, training_service
from tinkercloud.services.recovery import training_outcomes
from tinkercloud.services.results import result_answer

WRITING = frozenset("wax+")
INLINE = (
    (training_service, "INLINE_BYTES"),
    (sampling_service, "INLINE_BYTES"),
    (sampling_service, "INLINE_TOKENS"),
    (training_outcomes, "INLINE_DATUMS"),
    (result_answer, "INLINE_BYTES"),
)
"""Up to which sizes the service computes on the event loop."""


class Forbidden(AssertionError):
    """A run reached for a thread, a socket or a real wait."""


@contextmanager
def simulated(
    loop: SimulatedLoop,
    wall: Callable[[], float],
    entropy: random.Random,
    disk: Disk,
    all_is_large: bool,
) -> Iterator[None]:
    """wall: the clock that may be set. entropy: what the machine's random numbers are made of.
    all_is_large: the service does in threads what it does so where requests are large."""
    with ExitStack() as stack:
        values = [
            *_clocks(loop, wall),
            *_randomness(entropy),
            *_refused(),
            _rewards(),
            _threads(loop),
        ]
        if all_is_large:
            values += [(module, name, 0) for module, name in INLINE]
        for target, name, value in values:
            stack.enter_context(patch.object(target, name, value))
        for target, name, value in _files(disk):
            stack.enter_context(patch.object(target, name, value))
        state = random.getstate()
        random.seed(entropy.getrandbits(64))
        try:
            yield
        finally:
            random.setstate(state)


def _clocks(loop: SimulatedLoop, wall: Callable[[], float]) -> list[tuple[Any, str, Any]]:
    return [
        (time, "time", wall),
        (time, "monotonic", lambda: loop.now),
        (time, "perf_counter", lambda: loop.now),
    ]


def _randomness(entropy: random.Random) -> list[tuple[Any, str, Any]]:
    return [
        (os, "urandom", entropy.randbytes),
        (random, "_urandom", entropy.randbytes),
        # faster than by urandom, and ids are drawn often
        (uuid, "uuid4", lambda: uuid.UUID(int=entropy.getrandbits(128), version=4)),
    ]


def _refused() -> list[tuple[Any, str, Any]]:
    def refuse(name: str) -> Callable[..., Any]:
        def refused(*args: object, **options: object) -> Any:
            raise Forbidden(f"{name} in a simulation")

        return refused

    return [
        (time, "sleep", refuse("time.sleep")),
        (threading.Thread, "start", refuse("a thread")),
        (socket, "socket", refuse("a socket")),
    ]


def _threads(loop: SimulatedLoop) -> tuple[Any, str, Any]:
    """Of files that are sent."""

    async def run_sync(function: Callable[..., Any], *args: object, **options: object) -> Any:
        return await loop.run_in_executor(None, function, *args)

    return anyio.to_thread, "run_sync", run_sync


def _rewards() -> tuple[Any, str, Any]:
    """Of a webhook elsewhere, which is slow, and now and then out of order."""

    async def post(self: WebhookSender, *question: object) -> bytes:
        await asyncio.sleep(random.expovariate(1.0))
        if random.random() < 0.2:
            raise WebhookFailed("it is out of order")
        return b'{"reward": 0.5}'

    return WebhookSender, "_post", post


def _files(disk: Disk) -> list[tuple[Any, str, Any]]:
    """Every way by which names and contents change below the disk's place."""
    opens = _watched_open(disk, io.open)
    remove, rmdir = _watched_remove(disk, os.unlink), _watched_remove(disk, os.rmdir)
    names = [
        (os, "mkdir", _watched_make(disk, os.mkdir, 0)),
        (os, "link", _watched_make(disk, os.link, 1)),
        (os, "rename", _watched_rename(disk, os.rename)),
        (os, "replace", _watched_rename(disk, os.replace)),
        *((os, name, remove) for name in ("unlink", "remove")),
        (os, "rmdir", rmdir),
        (os, "utime", _timed(os.utime)),
        (os, "fsync", _watched_fsync(disk, os.fsync)),
        (shutil, "rmtree", _watched_rmtree(disk, remove, rmdir)),
    ]
    return [*names, (io, "open", opens), (builtins, "open", opens)]


def _timed(plain: Callable[..., Any]) -> Callable[..., Any]:
    """When something was used last, by the clock of the run."""

    def timed(path: Any, times: Any = None, **options: Any) -> None:
        if times is None and not options:
            times = (time.time(),) * 2
        plain(path, times, **options)

    return timed


def _watched_open(disk: Disk, plain: Callable[..., Any]) -> Callable[..., Any]:
    def watched(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if isinstance(file, int) or WRITING.isdisjoint(mode):
            return plain(file, mode, *args, **options)
        path = Path(os.fspath(file))
        if not disk.holds(path):
            return plain(file, mode, *args, **options)
        disk.point("write", path)
        is_new = not path.exists()
        opened = plain(file, mode, *args, **options)
        if is_new:
            disk.made(path)
        return opened

    return watched


def _watched_make(disk: Disk, plain: Callable[..., Any], index: int) -> Callable[..., Any]:
    """index: which argument is the new name."""

    def watched(*args: Any, **options: Any) -> None:
        path = Path(args[index])
        if not disk.holds(path):
            return plain(*args, **options)
        disk.point(plain.__name__, path)
        plain(*args, **options)
        disk.made(path)

    return watched


def _watched_remove(disk: Disk, plain: Callable[..., Any]) -> Callable[..., Any]:
    def watched(path: Any, *args: Any, **options: Any) -> None:
        removed = Path(path)
        if not disk.holds(removed):
            return plain(path, *args, **options)
        disk.point(plain.__name__, removed)
        disk.going(removed)
        plain(path)
        disk.gone(removed)

    return watched


def _watched_rename(disk: Disk, plain: Callable[..., Any]) -> Callable[..., Any]:
    def watched(source: Any, target: Any, **options: Any) -> None:
        if not disk.holds(Path(source)):
            return plain(source, target, **options)
        disk.point("rename", Path(target))
        plain(source, target, **options)
        os.utime(target)  # by the clock of the run
        disk.moved(Path(source), Path(target))
        disk.point("after rename", Path(target))

    return watched


def _watched_fsync(disk: Disk, plain: Callable[..., Any]) -> Callable[..., Any]:
    def watched(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not disk.holds(path):
            return plain(descriptor)
        disk.point("fsync", path)
        if path.exists():  # not of a file without a name
            disk.synced(path)
        disk.point("after fsync", path)

    return watched


def _watched_rmtree(
    disk: Disk, remove: Callable[..., Any], rmdir: Callable[..., Any]
) -> Callable[..., Any]:
    plain = shutil.rmtree

    def watched(path: Any, ignore_errors: bool = False, **options: Any) -> None:
        top = Path(path)
        if not disk.holds(top):
            return plain(path, ignore_errors, **options)
        try:
            _remove_below(top)
        except OSError:
            if not ignore_errors:
                raise

    def _remove_below(folder: Path) -> None:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                _remove_below(Path(entry.path))
            else:
                remove(Path(entry.path))
        rmdir(folder)

    return watched
