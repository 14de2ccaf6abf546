"""Write docs/benchmarks/ from benchmarks/results/: a summary of claims, and a page a benchmark.

A page has all results of a benchmark, of each variant and instruction set (`lib.result_name`). What
was missed, where the time goes and what was tried is said in the result's .md file; one that begins
with `<!-- commit X -->` speaks of a result of that commit, and is left out beside another one.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile

from benchmarks.claims import CLAIMS, Claim, Row, rows_of
from benchmarks.lib.machine import ROOT
from benchmarks.lib.report import Cell, Report, Target, table
from benchmarks.lib.result_name import ResultName

RESULTS = ROOT / "benchmarks" / "results"
FOLDER = ROOT / "docs" / "benchmarks"

SUMMARY = """# Benchmarks

Each line is a claim: our figure, and that of the best peer in the same run, or of a baseline of the
run where no peer does the same. *instruction set*: the one that our compiled kernels use on that
machine; a claim that was measured on several has a line for each. *ratio*: above 1, ours is ahead
of the peer; of a baseline, 1 is as good. *target*: what was measured, and the aim that was set
beforehand; memory's is a share of PEFT's best settings, that of RL a multiple of SkyRL's speed.
Pages hold all loads and targets, where the time goes, and what was tried.
"""

HOW = """## To repeat them

Figures are those of the machine that is named, at the date that the page names; take your own. In
the root of a checkout, after `make install`, the command of a claim measures its page with
`.venv/bin/python`; most have a small form (`--quick`). `make bench` runs all of them and writes
these pages anew (`benchmarks/render.py` makes them from `benchmarks/results/`). Peers are optional,
each in an environment of its own ([peers.md](../../benchmarks/peers.md)); those that are not
installed are listed as not measured. Every request is counted, failed ones too.

Figures that depend on the instruction set of our compiled kernels are kept for each: a run on
another kind of processor adds its results to these.

`python -m benchmarks.decode_stages` shows where a decoding pass spends its time.
"""

COLUMNS = (
    *("claim", "instruction set", "ours", "best peer", "ratio", "target", "machine", "command"),
    "page",
)


@dataclass(frozen=True)
class Compared:
    """What of a benchmark is shown side by side where several instruction sets were measured: one
    figure of each row, which `keys` name."""

    keys: Sequence[str]
    figure: str


COMPARED = {
    "sampling": Compared(("contender", "prompt", "at once"), "tokens/s"),
    "streaming": Compared(("contender", "dtype", "prompt", "at once"), "first p50 ms"),
    "training": Compared(("batch", "contender", "dtype"), "tokens/s"),
    "rl_step": Compared(("contender",), "seconds per step"),
}


def main() -> None:
    results = read_results()
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages(results).items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"{FOLDER.relative_to(ROOT)}: {len(results)} results")


def read_results() -> dict[str, Report]:
    """By the file's name without its ending."""
    return {path.stem: Report.read(path) for path in sorted(RESULTS.glob("*.json"))}


def pages(results: Mapping[str, Report]) -> dict[str, str]:
    """The text of each file in docs/benchmarks/."""
    names = sorted({benchmark_of(result) for result in results})
    written = {f"{name}.md": page(name, results) for name in names}
    return {"README.md": summary(names, results)} | written


def benchmark_of(result: str) -> str:
    return ResultName.of(result).benchmark


def results_of(benchmark: str, results: Mapping[str, Report]) -> dict[ResultName, Report]:
    """In the order of a page."""
    named = {ResultName.of(result): report for result, report in results.items()}
    mine = (name for name in named if name.benchmark == benchmark)
    return {name: named[name] for name in sorted(mine, key=lambda name: name.order)}


# ---- the summary


def summary(names: Sequence[str], results: Mapping[str, Report]) -> str:
    rows = [row for claim in CLAIMS for row in claim_rows(claim, results)]
    lines = [targets_met(name, results) for name in names]
    claims = table(COLUMNS, rows, [False] * len(COLUMNS))
    return "\n".join([SUMMARY, claims, "", "## Pages", "", *lines, "", HOW])


def claim_rows(claim: Claim, results: Mapping[str, Report]) -> list[tuple[str, ...]]:
    """One for each instruction set; none where the result, our figure in it or that of a peer is
    not there."""
    named = results_of(benchmark_of(claim.result), results)
    rows = [claim_row(claim, n, r) for n, r in named.items() if n.shared == claim.result]
    return [row for row in rows if row is not None]


def claim_row(claim: Claim, name: ResultName, report: Report) -> tuple[str, ...] | None:
    rows = rows_of(report)
    ours = claim.ours(rows) if rows else None
    if ours is None:
        return None
    peer = claim.peer(rows) if claim.peer is not None else None
    if claim.peer is not None and peer is None:
        return None
    ratio = f"{claim.ratio(rows, ours, peer):.2f}" if peer is not None else "-"
    names = (claim.target,) if isinstance(claim.target, str) else claim.target
    target = next((each for each in report.targets if each.name in names), None)
    instruction_set = name.instruction_set or report.instruction_set or "-"
    return (
        *(claim.text, instruction_set, ours.text, peer.text if peer is not None else "-", ratio),
        *(verdict(target), report.host, f"`{report.command}`"),
        f"[{name.benchmark}]({name.benchmark}.md)",
    )


def verdict(target: Target | None) -> str:
    if target is None:
        return "none"
    return f"{'met' if target.met else '**missed**'}: {target.value} ({target.target})"


def targets_met(name: str, results: Mapping[str, Report]) -> str:
    """By instruction set, where a benchmark has a result of each."""
    named = results_of(name, results)
    counts = []
    for instruction_set in dict.fromkeys(each.instruction_set for each in named):
        reports = [r for each, r in named.items() if each.instruction_set == instruction_set]
        targets = [target for report in reports for target in report.targets]
        met = f"{sum(target.met for target in targets)} of {len(targets)} targets met"
        counts.append(f"{met} on {instruction_set}" if instruction_set else met)
        if not targets:
            counts[-1] = "no targets"
    return f"- [{next(iter(named.values())).title}]({name}.md): {', '.join(counts)}"


# ---- a page


def page(benchmark: str, results: Mapping[str, Report]) -> str:
    reports = results_of(benchmark, results)
    first = next(iter(reports.values()))
    abouts = [report.about.split("\n\n") for report in reports.values()]
    same = takewhile(lambda texts: len(set(texts)) == 1, zip(*abouts, strict=False))
    shared = [texts[0] for texts in same]
    parts = [f"# {first.title}", *shared]
    for _, group in groupby(reports.items(), lambda item: item[0].variant):
        variant = dict(group)
        parts += side_by_side(variant)
        for name, report in variant.items():
            if len(reports) > 1 or name.instruction_set:
                parts.append(f"## {heading(name, report)}")
            parts += section(name, report, len(shared))
    return "\n\n".join(parts) + "\n"


def heading(name: ResultName, report: Report) -> str:
    where = f"{name.instruction_set} ({report.host})" if name.instruction_set else ""
    return ", ".join(filter(None, (name.variant, where)))


def side_by_side(reports: Mapping[ResultName, Report]) -> list[str]:
    """A table of one variant's results, a column for each instruction set; nothing of one alone."""
    compared = COMPARED.get(next(iter(reports)).benchmark)
    if compared is None or len(reports) < 2:
        return []
    figures = [
        {key_of(compared, row): row[compared.figure] for row in rows_of(report)}
        for report in reports.values()
    ]
    keys = dict.fromkeys(key for column in figures for key in column)
    rows = [(*key, *(column.get(key, "-") for column in figures)) for key in keys]
    columns = (*compared.keys, *(name.instruction_set for name in reports))
    title = ", ".join(filter(None, (next(iter(reports)).variant, "by instruction set")))
    text = f"## {title[0].upper()}{title[1:]}"
    return [text, f"{compared.figure}:", table(columns, rows, [False] * len(columns))]


def key_of(compared: Compared, row: Row) -> tuple[Cell, ...]:
    return tuple(row[column] for column in compared.keys)


def section(name: ResultName, report: Report, num_shared: int) -> list[str]:
    """Paragraphs: its `about` but for the first ones, the command, the table, targets, notes."""
    parts = [
        *report.about.split("\n\n")[num_shared:],
        f"```sh\n{report.command}\n```",
        report.table(),
    ]
    if report.targets:
        parts.append("\n".join(target.line() for target in report.targets))
    notes = RESULTS / f"{name}.md"
    if notes.exists() and (text := notes_of(report, notes.read_text(encoding="utf-8"))):
        parts.append(text)
    return [*parts, measured(report)]


def notes_of(report: Report, text: str) -> str:
    """Of another commit's result: none."""
    commit = re.match(r"<!-- commit (\S+) -->\s*", text)
    if commit is None:
        return text.strip()
    return text[commit.end() :].strip() if commit[1] == report.commit else ""


def measured(report: Report) -> str:
    machine = report.machine
    instructions = f"; {machine['instructions']}" if machine.get("instructions") else ""
    if report.instruction_set:
        instructions += f"; our kernels use {report.instruction_set}"
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    commit = f", commit {report.commit}" if report.commit else ""
    return (
        f"Measured {report.date} on {report.host}, {machine['memory_gib']} GiB "
        f"({machine['system']}{instructions}){commit}; {versions}."
    )


if __name__ == "__main__":
    main()
