"""Write docs/benchmarks.md from benchmarks/results/*.json.

What was missed, where the time goes and what was tried stands in NAME.md beside NAME.json.
"""

from pathlib import Path

from report import Report

HERE = Path(__file__).resolve().parent
TARGET = HERE.parent / "docs" / "benchmarks.md"

HEAD = """# Benchmarks

Made by `benchmarks/render.py` from `benchmarks/results/`; every table names the command that
measured it. The figures are those of the machine that is named, at the date that is named; run the
command for yours. Every request is counted, failed ones too.
"""


def main() -> None:
    paths = sorted((HERE / "results").glob("*.json"))
    TARGET.write_text("\n".join([HEAD, *map(section, paths)]), encoding="utf-8")
    print(f"{TARGET.relative_to(HERE.parent)}: {len(paths)} results")


def section(path: Path) -> str:
    report, notes = Report.read(path), path.with_suffix(".md")
    remarks = f"{notes.read_text(encoding='utf-8').strip()}\n\n" if notes.exists() else ""
    machine = report.machine
    where = f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    sources = f", commit {report.commit}" if report.commit else ""
    measured = f"Measured {report.date} on {where} ({machine['system']}){sources}; {versions}."
    return (
        f"## {report.title}\n\n{report.about}\n\n```sh\n{report.command}\n```\n\n"
        f"{report.table()}\n\n{targets(report)}{remarks}{measured}\n"
    )


def targets(report: Report) -> str:
    lines = [
        f"- {'met' if one['met'] else '**missed**'}: {one['name']}, {one['value']} "
        f"(target {one['target']})"
        for one in report.targets
    ]
    return "\n".join(lines) + "\n\n" if lines else ""


if __name__ == "__main__":
    main()
