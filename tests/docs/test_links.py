"""Links between the pages lead to files and headings that exist; the site's menu has every page."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from docs.build_site import CONFIG
from tests.docs.pages import Page, pages
from tests.serving import ROOT

PAGES = pages()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Page) -> None:
    assert [link for link in page.links() if not leads_somewhere(page, link)] == []


def leads_somewhere(page: Page, link: str) -> bool:
    """A relative link, to a file and perhaps to a heading in it. Others are not followed: tests
    have no network."""
    if "://" in link:
        return link.startswith("https://")
    path, _, anchor = unquote(link).partition("#")
    target = Page((page.path.parent / path).resolve() if path else page.path)
    if not target.path.exists() or not target.path.is_relative_to(ROOT):
        return False
    return not anchor or (target.path.suffix == ".md" and anchor in target.anchors())


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, ahead = set[Path](), [ROOT / "README.md"]
    while ahead:
        page = Page(ahead.pop())
        if page.path in reached:
            continue
        reached.add(page.path)
        targets = (link.partition("#")[0] for link in page.links() if "://" not in link)
        linked = ((page.path.parent / target).resolve() for target in targets)
        ahead += [path for path in linked if path.suffix == ".md"]
    assert {page.path for page in PAGES} - reached == set()


def in_the_menu(nodes: list[dict[str, object]]) -> Iterator[str]:
    for node in nodes:
        for value in node.values():
            yield from in_the_menu(value) if isinstance(value, list) else [str(value)]


def test_every_page_is_in_the_menu_of_the_site_once() -> None:
    listed = list(in_the_menu(tomllib.loads(CONFIG.read_text(encoding="utf-8"))["project"]["nav"]))
    names = {page.name for page in PAGES}
    assert names - set(listed) == set(), "to be put into the menu of docs/zensical.toml"
    assert set(listed) - names == set()
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize(
    "link", ["no-such-page.md", "README.md#no-such-heading", "http://insecure.example"]
)
def test_a_link_to_nothing_is_noticed(link: str) -> None:
    assert not leads_somewhere(Page(ROOT / "README.md"), link)


def test_headings_are_named_as_renderers_name_them(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("# What it *is*, `here`\n\n## Notes\n\n## Notes\n\n```sh\n# a comment\n```\n")
    assert Page(path).anchors() == {"what-it-is-here", "notes", "notes-1"}
