"""The worked examples of docs/extending.md, carried out in a copy of the repository."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.pages import Page
from tests.serving import QUIET, ROOT

PAGE = Page(ROOT / "docs" / "extending.md")
COPIED = ("tinkercloud", "tinker_gmi", "tests", "docs")
HEADER = re.compile(r"# ([\w./]+\.py)(?:, (above|below|in place of) (.+))?\n")
LIMIT_S = 500.0


@dataclass(frozen=True)
class Change:
    """A block of the page. where: "" for a whole file; else which side of the line that begins
    with `line`, indentation apart."""

    path: str
    where: str
    line: str
    code: str

    def apply(self, root: Path) -> None:
        file = root / self.path
        if not self.where:
            assert not file.exists(), f"{self.path} is in the repository"
            file.write_text(self.code, encoding="utf-8")
            return
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        (number,) = (i for i, line in enumerate(lines) if line.strip().startswith(self.line))
        first, after = self._span(number)
        indent = re.match(" *", lines[number])[0]  # type: ignore[index]
        new = [indent + line if line.strip() else line for line in self.code.splitlines(True)]
        file.write_text("".join((*lines[:first], *new, *lines[after:])), encoding="utf-8")

    def _span(self, number: int) -> tuple[int, int]:
        """The lines that it takes the place of."""
        first = number + (self.where == "below")
        return first, first + (self.where == "in place of")


def changes() -> list[Change]:
    found: list[Change] = []
    for block in PAGE.blocks("python"):
        header = HEADER.match(block)
        assert header is not None, f"a block that says no file: {block[:80]}"
        path, where, line = header.groups(default="")
        found.append(Change(path, where, line, block[header.end() :]))
    return found


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with all of the page's changes."""
    root = tmp_path_factory.mktemp("repository")
    unneeded = shutil.ignore_patterns("docs_site")
    for name in COPIED:
        shutil.copytree(ROOT / name, root / name, ignore=unneeded)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, root)
    for change in changes():
        change.apply(root)
    return root


def run(copy: Path, *arguments: str) -> None:
    environment = os.environ | QUIET | {"PYTHONPATH": str(copy)}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_examples_pass_their_own_tests_and_the_import_rule(copy: Path) -> None:
    paths = dict.fromkeys(change.path for change in changes())
    tests = [path for path in paths if path.startswith("tests/")]
    assert {Path(test).parts[1] for test in tests} == {"api", "architectures", "embedded", "losses"}
    run(copy, "pytest", "-q", "-p", "no:cacheprovider", "tests/test_architecture.py", *tests)


def test_the_examples_are_written_in_the_house_style(copy: Path) -> None:
    paths = sorted({change.path for change in changes()})
    run(copy, "ruff", "check", "--no-cache", *paths)
    run(copy, "ruff", "format", "--no-cache", "--check", *paths)
