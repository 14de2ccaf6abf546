"""Rows that a page quotes from another one are there as they are quoted."""

import re

import pytest

from tests.docs.pages import Page, pages
from tests.serving import ROOT

QUOTE = re.compile(r"<!-- from (\S+\.md) -->\n((?:\|.*\n)+)")
QUOTES = [
    (page, source, row)
    for page in pages()
    for source, table in QUOTE.findall(page.text)
    for row in table.splitlines()
]


@pytest.mark.parametrize(("page", "source", "row"), QUOTES)
def test_a_quoted_row_is_in_its_source(page: Page, source: str, row: str) -> None:
    assert row in (page.path.parent / source).read_text(encoding="utf-8").splitlines()


def test_figures_of_the_benchmarks_are_quoted() -> None:
    sources = {(page.path.parent / source).resolve() for page, source, _ in QUOTES}
    assert ROOT / "docs/benchmarks/deviation.md" in sources
