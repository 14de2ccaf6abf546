"""Runs simulated schedules: `python -m tests.simulation --seed N [--trace]`, or many of them.

--schedules, --seconds: how many seeds from --seed on, or for how long; each fourth ends the service
where none has yet. --at: end it at this await or flush; a failure says which. --planted: with one
of the bugs of `planted.py`; the exit status is then 0 where it is found. --shrink: of a failing
seed, leave out steps and faults while it still fails. --coverage: every await and flush crashed at.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import count

from tests.simulation.coverage import report
from tests.simulation.guide import EVERY, Guide
from tests.simulation.planted import PLANTED, planted
from tests.simulation.run import Outcome
from tests.simulation.schedule import Schedule
from tests.simulation.shrink import shrunk


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at", action="append", default=[], metavar="PLACE")
    parser.add_argument("--schedules", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--planted", choices=tuple(PLANTED))
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--coverage", action="store_true")
    options = parser.parse_args(argv)
    is_one = options.schedules is None and options.seconds is None
    every = None if is_one or options.planted else EVERY
    guide = Guide(every=every, places=frozenset(options.at))
    num_run = failed = 0
    began = time.monotonic()
    with planted(options.planted) if options.planted else nullcontext():
        for seed in seeds(options.seed, options.schedules, options.seconds):
            outcome = guide.run(seed, logs=options.trace)
            num_run += 1
            if options.trace:
                show_trace(outcome)
            if outcome.failures:
                failed += 1
                show(outcome, options.planted)
                if options.shrink:
                    show_schedule(shrunk(outcome.schedule))
                if options.planted:
                    break
    if options.coverage:
        say(report(guide.coverage))
    say(f"{num_run} schedules in {time.monotonic() - began:.1f} s, {failed} failed")
    return int(bool(failed) != bool(options.planted))


def seeds(first: int, num: int | None, seconds: float | None) -> Iterator[int]:
    """One seed where neither a number nor a time is given."""
    if num is None and seconds is None:
        num = 1
    began = time.monotonic()
    for seed in count(first):
        if num is not None and seed - first >= num:
            return
        if seconds is not None and time.monotonic() - began > seconds:
            return
        yield seed


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


def show(outcome: Outcome, bug: str | None) -> None:
    for failure in outcome.failures[:5]:
        say(f"seed {outcome.schedule.seed}: {failure}")
    plant = f" --planted {bug!r}" if bug else ""
    say(f"again: python -m tests.simulation {outcome.again}{plant}")


def show_trace(outcome: Outcome) -> None:
    for now, text in outcome.trace:
        say(f"{now:10.4f} {text}")


def show_schedule(schedule: Schedule) -> None:
    say(f"what is left of it: {schedule}")


if __name__ == "__main__":
    sys.exit(main())
