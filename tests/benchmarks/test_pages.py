"""docs/benchmarks/ is what render.py makes of the results, and its claims are in them."""

import json
from pathlib import Path

import pytest

from benchmarks import render
from benchmarks.claims import CLAIMS, Best, Claim
from benchmarks.lib.machine import machine
from benchmarks.lib.report import Report, Target, about, table
from benchmarks.lib.result_name import ResultName, path_for
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
    rows = render.claim_rows(claim, results)
    assert rows, "our figure is not there"
    for text, in_use, ours, peer, ratio, target, *_ in rows:
        assert text and in_use and ours
        assert (peer == "-") == (ratio == "-") == (claim.peer is None)
        assert (target == "none") == (claim.target == "")


def test_every_page_has_a_claim_in_the_summary(results: dict[str, Report]):
    claimed = {render.benchmark_of(claim.result) for claim in CLAIMS}
    assert claimed == {render.benchmark_of(result) for result in results}


def test_a_claim_that_was_not_measured_is_left_out_of_the_summary(results: dict[str, Report]):
    without = {
        name: report for name, report in results.items() if not name.startswith("concurrency")
    }
    text = render.summary(["sharing"], without)
    assert "throughput of 256 clients" not in text
    assert "sampling and training at once: training" in text


def test_a_claim_whose_peer_was_not_measured_is_left_out_of_the_summary():
    ours, theirs = (Best("speed", "/s", {"what": who}) for who in ("ours", "theirs"))
    claim = Claim("speed-fast", "fast", ours, theirs)
    alone, beside = report(rows=[["ours", 2.0]]), report(rows=[["ours", 2.0], ["theirs", 1.0]])
    assert render.claim_rows(claim, {"speed-fast.avx2": alone}) == []
    assert len(render.claim_rows(claim, {"speed-fast.avx2": beside})) == 1


def test_results_of_one_benchmark_share_a_page_that_says_the_same_things_once():
    first = report(about="Of both.\n\nOf the first.", title="Speed")
    second = report(about="Of both.\n\nOf the second.", title="Speed")
    page = render.page("speed", {"speed-a": first, "speed-b": second})
    assert page.startswith("# Speed\n\nOf both.\n\n## a\n\nOf the first.\n")
    assert page.count("Of both.") == 1
    assert "\n\n## b\n\nOf the second.\n" in page


# ---- results by instruction set


def test_a_claim_has_a_line_for_each_instruction_set_that_was_measured():
    speeds = {"avx2": 2.0, "amx": 6.0}
    results = {
        f"speed-fast.{name}": report(rows=[["ours", speed], ["theirs", 1.0]])
        for name, speed in speeds.items()
    }
    ours, theirs = (Best("speed", "/s", {"what": who}) for who in ("ours", "theirs"))
    rows = render.claim_rows(Claim("speed-fast", "fast", ours, theirs), results)
    assert [row[1:5] for row in rows] == [
        ("amx", "6 /s", "1 /s", "6.00"),
        ("avx2", "2 /s", "1 /s", "2.00"),
    ]


def test_a_page_shows_instruction_sets_side_by_side_and_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(render.COMPARED, "speed", render.Compared(("what",), "speed"))
    avx512 = report(rows=[["ours", 1.5], ["theirs", 1.0]])
    page = render.page("speed", {"speed.avx512": avx512, "speed.amx": report(rows=[["ours", 9.5]])})
    assert "## By instruction set\n\nspeed:\n\n" in page
    assert "| ours   | 9.50 | 1.50   |\n| theirs | -    | 1.00   |" in page
    assert page.index("## amx (P, 2 cores)") < page.index("## avx512 (P, 2 cores)")
    assert "## By instruction set" not in render.page("speed", {"speed.amx": avx512})


def test_the_summary_counts_the_targets_of_each_instruction_set():
    missed, met = (Target.at_least("speed", value, 2.0) for value in (1.0, 3.0))
    results = {
        "speed-a.amx": report(targets=[met]),
        "speed-a.avx2": report(targets=[missed]),
        "speed-b.amx": report(targets=[missed]),
    }
    line = render.targets_met("speed", results)
    assert line == "- [T](speed.md): 1 of 2 targets met on amx, 0 of 1 targets met on avx2"


@pytest.mark.parametrize(
    ("stem", "parts"),
    [
        ("training", ("training", "", "")),
        ("training.amx", ("training", "", "amx")),
        ("sampling-bfloat16.avx512_bf16", ("sampling", "bfloat16", "avx512_bf16")),
        ("cookbook_recipes-0.6.1", ("cookbook_recipes", "0.6.1", "")),
    ],
)
def test_the_name_of_a_result_has_benchmark_variant_and_instruction_set(
    stem: str, parts: tuple[str, str, str]
):
    name = ResultName.of(stem)
    assert (name.benchmark, name.variant, name.instruction_set) == parts
    assert str(name) == stem


def test_a_run_on_another_processor_leaves_the_result_of_the_first_alone(tmp_path: Path):
    path = tmp_path / "speed-fast.json"
    for name in ("avx512_bf16", "amx", "amx"):
        report(machine=MACHINE | {"instruction_set": name}).publish(path, by_instruction_set=True)
    written = sorted(each.name for each in tmp_path.iterdir())
    assert written == ["speed-fast.amx.json", "speed-fast.avx512_bf16.json"]
    assert path_for(tmp_path / written[0], "avx2").name == "speed-fast.avx2.json"


def test_notes_of_another_commit_are_left_out():
    of_abc = report(commit="abc")
    assert render.notes_of(of_abc, "Slow.\n") == "Slow."
    assert render.notes_of(of_abc, "<!-- commit abc -->\nSlow.\n") == "Slow."
    assert render.notes_of(of_abc, "<!-- commit abcd -->\nSlow.\n") == ""


# ---- a report

MACHINE = {"processor": "P", "cores": 2, "memory_gib": 4, "system": "S"}


def report(**fields) -> Report:
    shared = {"command": "measure", "columns": ["what", "speed"], "rows": [["ours", 1.5]]}
    rest = {"versions": {}, "machine": MACHINE, "title": "T", "about": "A."}
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
