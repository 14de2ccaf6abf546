"""Ctrl-C and SIGTERM for recipes that have a server of their own to end.

A signal is only remembered, and what takes long looks for it. An exception raised by its handler
would come anywhere: where Python drops it and prints a traceback, as in the callback of a weak
reference, or between the start of a process and the line that keeps it in order to end it.
"""

import signal
import subprocess
import threading
from collections.abc import Callable
from typing import TypeVar

POLL_S = 0.1

T = TypeVar("T")
_asked = list[int]()


class Interrupted(Exception):
    """status: as a shell has it of a process that a signal ended."""

    def __init__(self, number: int):
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.status = 128 + number


def remember_signals() -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda number, _: _asked.append(number))


def check() -> None:
    """Raises Interrupted where a signal has come."""
    if _asked:
        raise Interrupted(_asked[0])


def run(work: Callable[[], T]) -> T:
    """What it returns or raises. Raises Interrupted, and leaves it behind in its thread: the
    process is to be ended by os._exit then."""
    results, errors = list[T](), list[BaseException]()

    def work_on() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=work_on, name="recipe", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_S)
        check()
    if errors:
        raise errors[0]
    return results[0]


def output_of(command: list[str]) -> tuple[int, str]:
    """Exit status, and what it writes. Raises Interrupted once it is ended."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            while True:
                check()
                try:
                    written, _ = process.communicate(timeout=POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    pass
        except Interrupted:
            process.kill()
            raise
    check()  # Ctrl-C ends it as well
    return process.returncode, written
