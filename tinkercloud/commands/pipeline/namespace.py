"""A network namespace behind a link of any delay and loss.

Packets travel between two TUN devices, one on each side of this process, which keeps them for the
delay and drops some; so it needs no module of the kernel as tc's netem does. TCP on both sides is
the kernel's own, with its retransmissions.
"""

import ctypes
import fcntl
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from pathlib import Path

from tinkercloud.errors import ConfigError

TUN = Path("/dev/net/tun")
CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
PACKET_BYTES = 2**16


def missing() -> str:
    """What this machine lacks for it; "" where it has all."""
    if not TUN.exists():
        return f"there is no {TUN}"
    if os.geteuid() != 0:
        return "only root may make network namespaces and TUN devices"
    return "" if shutil.which("ip") else "not installed: ip (iproute2)"


def enter(delay_s: float, loss: float) -> str:
    """This thread, and those that it starts, are from now on in a namespace of their own; returns
    its address. delay_s: each way. loss: the share of packets that are dropped, each way. Raises
    ConfigError."""
    reason = missing()
    if reason:
        raise ConfigError(f"no network namespace: {reason}")
    subnet, name = f"10.223.{os.getpid() % 256}", f"tun{os.getpid() % 10**9}"
    outside = _device(name, f"{subnet}.1")
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise ConfigError(f"no network namespace: {os.strerror(ctypes.get_errno())}")
    inside = _device(name, f"{subnet}.2")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for number, (source, target) in enumerate(((outside, inside), (inside, outside))):
        link = _Link(source, target, delay_s, loss, random.Random(number))
        threading.Thread(target=link.run, name="link", daemon=True).start()
    return f"{subnet}.2"


def _device(name: str, address: str) -> int:
    """Of this thread's namespace; ends with the process."""
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    subprocess.run(["ip", "address", "add", f"{address}/30", "dev", name], check=True)
    subprocess.run(["ip", "link", "set", name, "up"], check=True)
    return device


class _Link:
    """One way."""

    def __init__(self, source: int, target: int, delay_s: float, loss: float, coins: random.Random):
        self._source, self._target = source, target
        self._delay_s, self._loss, self._coins = delay_s, loss, coins
        self._underway: deque[tuple[float, bytes]] = deque()

    def run(self) -> None:
        while True:
            wait_s = self._underway[0][0] - time.monotonic() if self._underway else None
            if wait_s is None or wait_s > 0:
                select.select([self._source], [], [], wait_s)
            self._take()
            while self._underway and self._underway[0][0] <= time.monotonic():
                os.write(self._target, self._underway.popleft()[1])

    def _take(self) -> None:
        try:
            while packet := os.read(self._source, PACKET_BYTES):
                if self._coins.random() >= self._loss:
                    self._underway.append((time.monotonic() + self._delay_s, packet))
        except BlockingIOError:
            return
