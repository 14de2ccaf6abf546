"""What the pages name exists: files, modules, classes and functions."""

import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.pages import Page, pages
from tests.serving import ROOT

PAGES = pages()
SOURCES = ("tinkercloud", "tinker_gmi", "tests", "benchmarks", "cookbook", "docs", ".ci")
SUFFIXES = "py|c|h|sql|proto|sh|toml|yaml|md|png|svg"
# Below these a path may be named from; `embedded/backend.py` is short for the one in tinkercloud/.
BASES = (ROOT, ROOT / "tinkercloud", ROOT / "docs")
# Written where they are used, by a server, a test run or a user.
WRITTEN_LATER = {"config.yaml", "pool.yaml", "demo.png", "demo-out/demo.png"}
PLACEHOLDER = re.compile(r"NAME|PEER")


def paths_in(page: Page) -> Iterator[str]:
    for span in page.spans():
        yield from re.findall(rf"(?<![\w$~./-])[\w./-]+\.(?:{SUFFIXES})\b(?!\w)", span)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_is_named_exists(page: Page) -> None:
    assert [path for path in paths_in(page) if not exists(path, page)] == []


def exists(path: str, page: Page) -> bool:
    if path in WRITTEN_LATER or PLACEHOLDER.search(path):
        return True
    if "/" not in path and path in file_names():
        return True
    return any((base / path).exists() for base in (*BASES, page.path.parent))


@cache
def file_names() -> frozenset[str]:
    return frozenset(path.name for path in source_files())


@cache
def source_files() -> tuple[Path, ...]:
    below = [path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.is_file()]
    return (*(path for path in ROOT.iterdir() if path.is_file()), *below)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_that_is_named_exists(page: Page) -> None:
    dotted = r"\b(?:tinkercloud|tinker_gmi|tests|benchmarks)(?:\.\w+)+"
    names = [name for span in page.spans() for name in re.findall(dotted, span)]
    assert [name for name in names if not is_module_or_member(name)] == []


def is_module_or_member(name: str) -> bool:
    """ "tinkercloud.errors", "tinkercloud.errors.ConfigError". Imports packages, not the module."""
    package, _, last = name.rpartition(".")
    if Path(ROOT, *name.split(".")).exists() or (ROOT / name).exists():
        return True
    if Path(ROOT, *name.split(".")).with_suffix(".py").exists():
        return True
    spec = find_spec(package) if Path(ROOT, *package.split(".")).parent.exists() else None
    origin = spec.origin if spec else None
    return origin is not None and re.search(rf"\b{last}\b", Path(origin).read_text()) is not None


# Not in the page that names what other projects have.
OURS = [page for page in PAGES if page.name != "benchmarks/peers.md"]


@pytest.mark.parametrize("page", OURS, ids=lambda page: page.name)
def test_every_identifier_that_is_named_occurs_in_the_sources(page: Page) -> None:
    camel, snake = r"(?:[A-Z]+[a-z\d]+){2,}", r"[a-z]\w*_\w+"
    names = {
        name
        for span in page.spans()
        for name in re.findall(rf"(?<![\w/-])(?:{camel}|{snake})(?![\w/-])", span)
    }
    assert sorted(names - words()) == []


@cache
def words() -> frozenset[str]:
    """Of all sources but the pages themselves, file names among them."""
    texts = [
        path.read_text(encoding="utf-8")
        for path in source_files()
        if path.suffix in (".py", ".c", ".h", ".sql", ".proto", ".toml", ".yaml", ".sh", ".txt")
        or path.name in ("Makefile", "Dockerfile")
    ]
    stems = {path.stem for path in source_files()}
    return frozenset(stems | set(re.findall(r"\w+", "\n".join(texts))))


def test_every_term_of_the_glossary_has_a_meaning_and_a_place() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    terms = [row for row in rows if row[0].strip() != "term"]
    assert len(terms) > 50
    for term, meaning, place in terms:
        assert meaning.strip(), term
        assert "`" in place, term


def test_what_does_not_exist_is_noticed() -> None:
    page = PAGES[0]
    assert not exists("embedded/" + "no_such_file.py", page)
    assert not is_module_or_member("tinkercloud.no_such" + "_module.f")
    assert is_module_or_member("tinkercloud.cluster.sglang.entry")
