"""The runner of the tests: its budgets, its slices, and that nothing is left out of them."""

import re
from pathlib import Path

import pytest

from tests import suite
from tests.suite import Budget, Timed, head_commit, print_budget, read_report, slice_of, slowness

BUDGET = Budget.read()
FILES = sorted(
    path.relative_to(suite.ROOT).as_posix() for path in (suite.ROOT / "tests").rglob("test_*.py")
)


def test_every_folder_of_tests_has_a_budget():
    folders = {Timed(file, "", 0).folder for file in FILES}
    assert folders == set(BUDGET.folders) | set(BUDGET.cluster)


def test_every_file_with_slow_tests_has_its_time_for_a_slice():
    marked = re.compile(r"\bmark\.slow\b")
    slow = {file for file in FILES if marked.search((suite.ROOT / file).read_text("utf-8"))}
    assert slow == set(BUDGET.slow)


def test_folders_and_files_that_are_named_exist():
    names = [name for folders in (*BUDGET.parallel.values(), BUDGET.long) for name in folders]
    assert [name for name in names if not (suite.ROOT / "tests" / name).exists()] == []


def test_a_folder_beyond_its_tolerance_is_named(capsys):
    tests = [Timed("tests/api/test_a.py", "a", 10.5), Timed("tests/core/test_b.py", "b", 9.5)]
    assert print_budget(tests, {"api": 5.0, "core": 5.0}, 1.0) == ["api"]
    assert print_budget(tests, {"api": 5.0, "core": 5.0}, 1.5) == []
    assert "210%" in capsys.readouterr().out


def test_a_folder_without_a_budget_is_named(capsys):
    assert print_budget([Timed("tests/new/test_a.py", "a", 0.1)], {}, 1.0) == ["new"]
    assert "no budget" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "folder"),
    [
        ("tests/test_suite.py", "."),
        ("tests/api/test_bad_input.py", "api"),
        ("tests/embedded/sampling/engine/test_speculation.py", "embedded/sampling"),
        ("tests/cluster/test_pool.py", "cluster"),
    ],
)
def test_a_folder_is_two_deep_at_most(file, folder):
    assert Timed(file, "", 0.0).folder == folder


def test_a_slice_fits_and_is_another_one_for_another_commit():
    slow = {f"tests/test_{i}.py": 100.0 for i in range(8)}
    slices = [slice_of(slow, 350.0, commit) for commit in ("a", "b", "c", "d", "e", "f")]
    assert {len(files) for files in slices} == {3}
    assert slices[0] == slice_of(slow, 350.0, "a")
    assert len({file for files in slices for file in files}) > 5
    assert slice_of(slow, 50.0, "a") == []


def test_times_are_read_from_a_report(tmp_path: Path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.api.test_a" name="test_x[1]"'
        ' file="tests/api/test_a.py" line="3" time="0.25"/></testsuite></testsuites>'
    )
    assert read_report(report) == [Timed("tests/api/test_a.py", "test_x[1]", 0.25)]


def test_a_run_of_pytest_reports_what_it_ran():
    status, tests = suite.pytest("-q", "tests/test_suite.py", "-k", "two_deep")
    assert (status, len(tests)) == (0, 4)
    assert all(test.file == "tests/test_suite.py" for test in tests)


def test_a_machine_counts_as_slow_as_it_was_at_its_slowest():
    assert slowness([0.1, 0.3, 0.1], 0.1) == pytest.approx(3.0)
    assert slowness([0.05], 0.1) == 1.0


def test_the_commit_is_known():
    assert re.fullmatch(r"[0-9a-f]{40}", head_commit())
