"""Ports for programs that are told theirs before they run.

They lie below those that the system gives to whoever asks for just any, so that no connection and
no other server takes one first. Processes of tests take blocks of them: a block is whose process
holds its first port bound.
"""

import socket
from functools import cache

BLOCK = 100
BLOCKS = range(20_000, 32_000, BLOCK)  # Linux gives from 32768 on


def reserved_port() -> int:
    return reserved_ports(1)


def reserved_ports(count: int) -> int:
    """The first of several in a row."""
    return _ports().reserve(count)


class _Ports:
    def __init__(self) -> None:
        self._holds = list[socket.socket]()
        self._next = self._end = 0

    def reserve(self, count: int) -> int:
        assert count < BLOCK
        while True:
            if self._next + count > self._end:
                self._take_block()
            first = self._next
            self._next += count
            if all(map(_is_free, range(first, first + count))):
                return first

    def _take_block(self) -> None:
        for start in BLOCKS:
            hold = socket.socket()
            try:
                hold.bind(("127.0.0.1", start))
            except OSError:
                hold.close()
                continue
            self._holds.append(hold)
            self._next, self._end = start + 1, start + BLOCK
            return
        raise AssertionError("no ports are free")


@cache
def _ports() -> _Ports:
    return _Ports()


def _is_free(port: int) -> bool:
    """Also of what has ended there and left connections that wait for their end."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
