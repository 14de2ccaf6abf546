"""Runs the tests within their time budgets: `python -m tests.suite fast | cluster | slow | all`.

fast: what is neither slow nor a cluster's; folders and files that `budget.toml` calls parallel run
on two processes, then the others one after another, because they measure time or compute on all
cores. Two processes begin with the files that take longest, so that neither has one to itself at
the end.
slow: a slice of the slow tests that fits into `--seconds`, another one for each commit, so that in
a few runs all of them had their turn. Each mode prints the 20 slowest tests and what each folder
took of its budget. Where CI is set, a folder beyond twice its budget fails the run: less
than that is what two hours of one machine may differ by.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
BUDGET = ROOT / "tests" / "budget.toml"
TOLERANCE = 2.0
NUM_SLOWEST = 20
NO_TESTS = 5  # pytest's exit status where nothing was selected


@dataclass(frozen=True, slots=True)
class Budget:
    """folders, slow: seconds by folder and by file of slow tests, on a machine whose `probe_s` is
    this one. parallel: folders by how many threads of PyTorch each of two processes has. long:
    files in the order in which they begin, before all others."""

    probe_s: float
    parallel: dict[int, tuple[str, ...]]
    long: tuple[str, ...]
    folders: dict[str, float]
    cluster: dict[str, float]
    slow: dict[str, float]

    @classmethod
    def read(cls, path: Path = BUDGET) -> "Budget":
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        return cls(
            table["machine"]["probe_s"],
            {each["threads"]: tuple(each["folders"]) for each in table["parallel"]},
            tuple(table["order"]["long"]),
            table["folders"],
            table["cluster"],
            table["slow"],
        )


@dataclass(frozen=True, slots=True)
class Timed:
    """One test: setup, call and teardown together. file: below the repository's root."""

    file: str
    name: str
    seconds: float

    @property
    def folder(self) -> str:
        """Below tests/, two deep at most: "api", "embedded/sampling", or "." for none."""
        return "/".join(Path(self.file).relative_to("tests").parts[:-1][:2]) or "."


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.suite", description=__doc__)
    parser.add_argument("mode", choices=("fast", "cluster", "slow", "all"))
    parser.add_argument("--seconds", type=float, default=1200.0, help="for a slice of slow tests")
    arguments = parser.parse_args(argv)
    budget = Budget.read()
    if arguments.mode == "slow":
        chosen = slice_of(budget.slow, arguments.seconds, head_commit())
        return run_slice(chosen)
    probes = [probe()]
    status, tests = run_mode(arguments.mode, budget, probes)
    print_slowest(tests)
    limits = budget.cluster if arguments.mode == "cluster" else budget.folders
    over = print_budget(tests, limits, slowness(probes, budget.probe_s))
    if over and os.environ.get("CI") and arguments.mode != "all":
        print(f"over {TOLERANCE:.0%} of the budget in tests/budget.toml: {', '.join(over)}")
        return status or 1
    return status


def run_mode(mode: str, budget: Budget, probes: list[float]) -> tuple[int, list[Timed]]:
    """The exit status of the first failing run of pytest, and every test's time. probes: gets one
    after each run."""

    def run(*arguments: str, **environment: str) -> None:
        runs.append(pytest(*arguments, **environment))
        probes.append(probe())

    runs: list[tuple[int, list[Timed]]] = []
    if mode == "cluster":
        run("-m", "not slow", "tests/cluster")
        return runs[0]
    picked = ["-m", "not slow", "--ignore=tests/cluster"] if mode == "fast" else []
    # A file's tests stay together, with their fixtures; files begin in the order given.
    in_twos = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    alone = ["tests"]
    for threads, names in budget.parallel.items():
        alone += [f"--ignore=tests/{name}" for name in names]
        run(*in_twos, *picked, *files_in(names, budget.long), OMP_NUM_THREADS=str(threads))
    run(*picked, *alone)
    statuses, tests = zip(*runs, strict=True)
    return next(filter(None, statuses), 0), [test for each in tests for test in each]


def files_in(names: Iterable[str], long: Sequence[str]) -> list[str]:
    """Files of tests in these folders (and these files) below tests/, from the repository's root;
    those of `long` first, in its order."""
    tests = ROOT / "tests"
    found: list[str] = []
    for name in names:
        place = tests / name
        paths = [place] if place.is_file() else sorted(place.rglob("test_*.py"))
        found += [path.relative_to(tests).as_posix() for path in paths]
    first = [file for file in long if file in found]
    return [f"tests/{file}" for file in dict.fromkeys((*first, *found))]


def pytest(*arguments: str, **environment: str) -> tuple[int, list[Timed]]:
    """Runs pytest in a process of its own, its output as it is."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ("-o", "junit_family=xunit1", "-o", "junit_duration_report=total")
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *options, *arguments]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment})
        return done.returncode, read_report(report) if report.exists() else []


def read_report(path: Path) -> list[Timed]:
    return [
        Timed(case.get("file") or "tests/?", case.get("name") or "?", float(case.get("time") or 0))
        for case in ElementTree.parse(path).iter("testcase")
    ]


def slice_of(slow: dict[str, float], seconds: float, commit: str) -> list[str]:
    """Files of slow tests in an order that the commit decides, as many as fit into the time."""
    files = sorted(slow)
    random.Random(commit).shuffle(files)
    chosen, left = list[str](), seconds
    for file in files:
        if slow[file] <= left:
            chosen.append(file)
            left -= slow[file]
    return chosen


def run_slice(files: Sequence[str]) -> int:
    if not files:
        print("no file of slow tests fits into the time that is left")
        return 0
    print(f"slow tests, this time those of: {', '.join(files)}", flush=True)
    status, tests = pytest("-m", "slow", *files)
    print_slowest(tests)
    return 0 if status == NO_TESTS else status


def head_commit() -> str:
    command = ("git", "-C", str(ROOT), "rev-parse", "HEAD")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def print_slowest(tests: Iterable[Timed]) -> None:
    print(f"\nthe {NUM_SLOWEST} slowest tests")
    for test in sorted(tests, key=lambda test: -test.seconds)[:NUM_SLOWEST]:
        print(f"{test.seconds:8.2f} s  {test.file}::{test.name}")


def print_budget(tests: Sequence[Timed], limits: dict[str, float], scale: float) -> list[str]:
    """What each folder took of its budget; the names of those beyond the tolerance. scale: how
    much slower this machine is than the one of the budget."""
    spent: dict[str, float] = dict.fromkeys(limits, 0.0)
    for test in tests:
        spent[test.folder] = spent.get(test.folder, 0.0) + test.seconds
    over = []
    print(f"\nseconds of each folder, and of its budget (this machine: x {scale:.2f})")
    for name, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        limit = limits.get(name, 0.0) * scale
        share = f"{seconds / limit:5.0%}" if limit else "no budget"
        print(f"{seconds:8.1f} s of {limit:6.1f}  {share}  {name}")
        if seconds > TOLERANCE * limit:
            over.append(name)
    return over


def slowness(probes: Sequence[float], recorded_s: float) -> float:
    """How many times slower this machine was, at its slowest, than the one of the budget; never
    below one."""
    return max(1.0, max(probes) / recorded_s)


def probe() -> float:
    """Seconds of a fixed piece of work, half of it Python's own, half numpy's; the best of five."""
    matrix = np.ones((384, 384), np.float32)

    def once() -> float:
        began = time.perf_counter()
        total = 0
        for number in range(600_000):
            total += number & 7
        for _ in range(12):
            np.matmul(matrix, matrix)
        return time.perf_counter() - began

    return min(once() for _ in range(5))


if __name__ == "__main__":
    sys.exit(main())
