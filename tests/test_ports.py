"""Nobody else is given a port that a test has reserved."""

import socket
import subprocess
import sys
from itertools import pairwise

from tests.ports import BLOCK, reserved_port, reserved_ports
from tests.serving import ROOT


def test_two_processes_have_no_port_in_common() -> None:
    show = "from tests.ports import *; print(*(reserved_ports(40) for _ in range(3)))"
    ours = [reserved_ports(40) for _ in range(3)]
    done = subprocess.run(
        [sys.executable, "-c", show], cwd=ROOT, capture_output=True, text=True, check=True
    )
    firsts = sorted([*ours, *map(int, done.stdout.split())])
    assert len(firsts) == 6
    assert all(after - before >= 40 for before, after in pairwise(firsts))


def test_a_port_in_use_is_passed_over() -> None:
    port = reserved_port()
    while (port + 1) % BLOCK == 0:  # the next one is another block's
        port = reserved_port()
    with socket.create_server(("127.0.0.1", port + 1)):
        first = reserved_ports(2)
    assert port + 1 not in (first, first + 1)
