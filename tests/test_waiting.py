"""What a wait in vain says: this is all that a failure on a busy machine leaves."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import async_wait_for, wait_for, wait_for_line


def test_the_first_value_that_holds_is_given() -> None:
    numbers = iter(range(10))
    assert wait_for("three", lambda: next(numbers), lambda n: n == 3, poll_s=0.0) == 3


def test_a_wait_in_vain_says_for_what_and_what_was_seen_last() -> None:
    with pytest.raises(AssertionError, match=r"not within 0 s: it is five; last seen: 4"):
        wait_for("it is five", lambda: 4, lambda n: n == 5, limit_s=0.0)


@pytest.mark.parametrize("is_coroutine", [False, True])
async def test_without_holding_the_event_loop(is_coroutine: bool) -> None:
    async def read() -> int:
        return 4

    each = read if is_coroutine else lambda: 4
    assert await async_wait_for("it is four", each, lambda n: n == 4) == 4
    with pytest.raises(AssertionError, match="last seen: 4"):
        await async_wait_for("it is five", each, lambda n: n == 5, limit_s=0.0)


def test_a_process_that_ends_without_its_line_is_not_waited_for(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", "print('begun\\nover')"], stdout=output)
    assert wait_for_line(r"^(o\w+)", log, process)[1] == "over"
    with pytest.raises(AssertionError, match="it wrote:\nbegun\nover"):
        wait_for_line("ready", log, process)
