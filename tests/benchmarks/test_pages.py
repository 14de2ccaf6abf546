"""docs/benchmarks/ is what render.py makes of the results, and its claims are in them."""

import json
from pathlib import Path

import pytest

from benchmarks import render
from benchmarks.claims import CLAIMS, Claim
from benchmarks.lib.machine import machine
from benchmarks.lib.report import Report, Target, about, table
from tinkercloud.embedded.native.compiler import instruction_set


@pytest.fixture(scope="module")
def results() -> dict[str, Report]:
    return render.read_results()


def test_the_committed_pages_are_what_the_committed_results_make(results: dict[str, Report]):
    pages = render.pages(results)
    committed = {path.name: path.read_text(encoding="utf-8") for path in render.FOLDER.iterdir()}
    assert committed == pages, "run `python -m benchmarks.render`"


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.text)
def test_a_claim_has_its_figures_and_its_target_in_the_results(
    claim: Claim, results: dict[str, Report]
):
    row = render.claim_row(claim, results)
    assert row is not None, "our figure is not there"
    text, ours, peer, ratio, target, *_ = row
    assert text and ours
    assert (peer == "-") == (ratio == "-") == (claim.peer is None)
    assert (target == "none") == (claim.target == "")


def test_every_page_has_a_claim_in_the_summary(results: dict[str, Report]):
    claimed = {render.benchmark_of(claim.result) for claim in CLAIMS}
    assert claimed == {render.benchmark_of(result) for result in results}


def test_a_claim_that_was_not_measured_is_left_out_of_the_summary(results: dict[str, Report]):
    without = {name: report for name, report in results.items() if name != "concurrency"}
    text = render.summary(["sharing"], without)
    assert "throughput of 256 clients" not in text
    assert "sampling and training at once: training" in text


def test_results_of_one_benchmark_share_a_page_that_says_the_same_things_once():
    first = report(about="Of both.\n\nOf the first.", title="Speed")
    second = report(about="Of both.\n\nOf the second.", title="Speed")
    page = render.page("speed", {"speed-a": first, "speed-b": second})
    assert page.startswith("# Speed\n\nOf both.\n\n## a\n\nOf the first.\n")
    assert page.count("Of both.") == 1
    assert "\n\n## b\n\nOf the second.\n" in page


# ---- a report


def report(**fields) -> Report:
    shared = {"command": "measure", "columns": ["what", "speed"], "rows": [["ours", 1.5]]}
    machine = {"processor": "P", "cores": 2, "memory_gib": 4, "system": "S"}
    rest = {"versions": {}, "machine": machine, "title": "T", "about": "A."}
    return Report(**{**shared, **rest, **fields})


def test_a_report_that_is_written_reads_the_same(tmp_path: Path):
    written = report(targets=[Target.at_least("speed", 1.5, 2.0)], commit="abc", date="2026-01-01")
    written.write(tmp_path / "r.json")
    assert Report.read(tmp_path / "r.json") == written


def test_the_instruction_set_of_the_kernels_is_part_of_a_result():
    assert machine()["instruction_set"] == instruction_set()
    page = render.measured(report(machine=machine()))
    assert f"; our kernels use {instruction_set()})" in page


def test_a_result_without_commit_and_targets_is_read(tmp_path: Path):
    report().write(tmp_path / "r.json")
    fields = json.loads((tmp_path / "r.json").read_text())
    del fields["commit"], fields["targets"]
    (tmp_path / "r.json").write_text(json.dumps(fields))
    read = Report.read(tmp_path / "r.json")
    assert (read.commit, read.targets) == ("", [])


def test_a_target_is_judged_by_the_value_and_shows_it_rounded():
    missed = Target.at_least("speed", 0.949, 0.95)
    assert (missed.value, missed.met) == (0.95, False)
    assert missed.line() == "- **missed**: speed, 0.95 (target >= 0.95)"
    assert Target.at_most("memory", 0.6, 0.6).met
    assert not Target.between("even", 1.06, 0.95, 1.05).met


def test_a_table_aligns_numbers_at_the_right():
    assert table(["name", "speed"], [["a", 1.0], ["bc", 250.4]], [False, True]) == (
        "| name | speed |\n| ---- | ----: |\n| a    |  1.00 |\n| bc   |   250 |"
    )


def test_prose_is_filled_and_tables_and_lists_are_not():
    words, rows = " ".join(["word"] * 40), "| a |\n|---|"
    text = about(f"{words}\n\n{rows}", left_out=["peer: not installed."])
    prose, *others = text.split("\n\n")
    assert max(map(len, prose.splitlines())) <= 100
    assert others == [rows, "Not measured:", "- peer: not installed."]
