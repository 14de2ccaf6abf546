"""Memory that a file's pages take on the coordinator after its layers were sent to the workers."""

import ctypes
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tinkercloud.errors import ConfigError

_MADV_PAGEOUT = 21
_SYS_PROCESS_MADVISE = 440  # the same number on every architecture of Linux


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """resident_bytes: of the file's pages in the process, before and after; available_bytes: of
    the machine's RAM."""

    resident_bytes: tuple[int, int]
    available_bytes: tuple[int, int]


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def reclaim(pid: int, files: list[Path]) -> Reclaimed:
    """Takes the files' pages out of the process's memory and then out of the page cache. What it
    reads again comes back from the disk. Raises ConfigError where the system cannot or may not."""
    if sys.platform != "linux":
        raise ConfigError("reclaim needs Linux; elsewhere the system frees a file's pages itself")
    before = resident_bytes(pid), _available()
    spans = _spans(pid, files)
    if spans:
        _page_out(pid, spans)
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    after = resident_bytes(pid), _available()
    return Reclaimed((before[0], after[0]), (before[1], after[1]))


def resident_bytes(pid: int) -> int:
    """Of pages that are backed by files."""
    match = re.search(r"^RssFile:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    return 0 if match is None else int(match[1]) * 1024


def _available() -> int:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    return 0 if match is None else int(match[1]) * 1024


def _spans(pid: int, files: list[Path]) -> list[tuple[int, int]]:
    """Addresses at which the process has them mapped."""
    paths = {str(path.resolve()) for path in files}
    spans = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, *_, path = line.split(maxsplit=5)
        if path in paths:
            start, end = (int(number, 16) for number in span.split("-"))
            spans.append((start, end - start))
    return spans


def _page_out(pid: int, spans: list[tuple[int, int]]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.pidfd_open(pid)
    try:
        for start, length in spans:
            span = _Span(start, length)
            done = libc.syscall(
                ctypes.c_long(_SYS_PROCESS_MADVISE), ctypes.c_int(descriptor), ctypes.byref(span),
                ctypes.c_ulong(1), ctypes.c_int(_MADV_PAGEOUT), ctypes.c_uint(0),
            )  # fmt: skip
            if done < 0:
                reason = os.strerror(ctypes.get_errno())
                raise ConfigError(
                    f"cannot take pages out of process {pid}: {reason}; run this as root, or give "
                    "the program CAP_SYS_NICE"
                )
    finally:
        os.close(descriptor)
