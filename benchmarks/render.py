"""Write docs/benchmarks/ from benchmarks/results/: a summary of claims, and a page a benchmark.

A page has the results NAME.json and NAME-VARIANT.json. What was missed, where the time goes and
what was tried is said in the result's .md file.
"""

from collections.abc import Mapping, Sequence
from itertools import takewhile

from benchmarks.claims import CLAIMS, Claim, rows_of
from benchmarks.lib.machine import ROOT
from benchmarks.lib.report import Report, Target, table

RESULTS = ROOT / "benchmarks" / "results"
FOLDER = ROOT / "docs" / "benchmarks"

SUMMARY = """# Benchmarks

Each line is a claim: our figure, and that of the best peer in the same run, or of a baseline of the
run where no peer does the same. *ratio*: above 1, ours is ahead of the peer; of a baseline, 1 is as
good. *target*: what was measured, and the aim that was set beforehand; memory's is a share of
PEFT's best settings, that of RL a multiple of SkyRL's speed. Pages hold all loads and targets,
where the time goes, and what was tried.
"""

HOW = """## To repeat them

Figures are those of the machine that is named, at the date that the page names; take your own. In
the root of a checkout, after `make install`, the command of a claim measures its page with
`.venv/bin/python`; most have a small form (`--quick`). `make bench` runs all of them and writes
these pages anew (`benchmarks/render.py` makes them from `benchmarks/results/`). Peers are optional,
each in an environment of its own ([peers.md](../../benchmarks/peers.md)); those that are not
installed are listed as not measured. Every request is counted, failed ones too.
"""

COLUMNS = ("claim", "ours", "best peer", "ratio", "target", "machine", "command", "page")


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
    return result.partition("-")[0]


# ---- the summary


def summary(names: Sequence[str], results: Mapping[str, Report]) -> str:
    rows = [row for claim in CLAIMS if (row := claim_row(claim, results)) is not None]
    lines = [targets_met(name, results) for name in names]
    claims = table(COLUMNS, rows, [False] * len(COLUMNS))
    return "\n".join([SUMMARY, claims, "", "## Pages", "", *lines, "", HOW])


def claim_row(claim: Claim, results: Mapping[str, Report]) -> tuple[str, ...] | None:
    """None where the result or our figure in it is not there."""
    report = results.get(claim.result)
    rows = rows_of(report) if report is not None else []
    ours = claim.ours(rows) if rows else None
    if report is None or ours is None:
        return None
    peer = claim.peer(rows) if claim.peer is not None else None
    ratio = f"{claim.ratio(rows, ours, peer):.2f}" if peer is not None else "-"
    target = next((each for each in report.targets if each.name == claim.target), None)
    name = benchmark_of(claim.result)
    where = f"{report.machine['processor']}, {report.machine['cores']} cores"
    return (
        *(claim.text, ours.text, peer.text if peer is not None else "-", ratio, verdict(target)),
        *(where, f"`{report.command}`", f"[{name}]({name}.md)"),
    )


def verdict(target: Target | None) -> str:
    if target is None:
        return "none"
    return f"{'met' if target.met else '**missed**'}: {target.value} ({target.target})"


def targets_met(name: str, results: Mapping[str, Report]) -> str:
    reports = [report for result, report in results.items() if benchmark_of(result) == name]
    targets = [target for report in reports for target in report.targets]
    counts = f"{sum(target.met for target in targets)} of {len(targets)} targets met"
    return f"- [{reports[0].title}]({name}.md): {counts if targets else 'no targets'}"


# ---- a page


def page(name: str, results: Mapping[str, Report]) -> str:
    reports = {result: r for result, r in results.items() if benchmark_of(result) == name}
    first = next(iter(reports.values()))
    abouts = [report.about.split("\n\n") for report in reports.values()]
    same = takewhile(lambda texts: len(set(texts)) == 1, zip(*abouts, strict=False))
    shared = [texts[0] for texts in same]
    parts = [f"# {first.title}", *shared]
    for result, report in reports.items():
        if len(reports) > 1:
            parts.append(f"## {result.partition('-')[2]}")
        parts += section(result, report, len(shared))
    return "\n\n".join(parts) + "\n"


def section(result: str, report: Report, num_shared: int) -> list[str]:
    """Paragraphs: its `about` but for the first ones, the command, the table, targets, notes."""
    parts = [
        *report.about.split("\n\n")[num_shared:],
        f"```sh\n{report.command}\n```",
        report.table(),
    ]
    if report.targets:
        parts.append("\n".join(target.line() for target in report.targets))
    notes = RESULTS / f"{result}.md"
    if notes.exists():
        parts.append(notes.read_text(encoding="utf-8").strip())
    return [*parts, measured(report)]


def measured(report: Report) -> str:
    machine = report.machine
    where = f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    instructions = f"; {machine['instructions']}" if machine.get("instructions") else ""
    if machine.get("instruction_set"):
        instructions += f"; our kernels use {machine['instruction_set']}"
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    commit = f", commit {report.commit}" if report.commit else ""
    return (
        f"Measured {report.date} on {where} ({machine['system']}{instructions}){commit}; "
        f"{versions}."
    )


if __name__ == "__main__":
    main()
