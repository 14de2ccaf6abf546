"""The documentation site: what goes into it, and what `make docs` notices in what it built."""

from pathlib import Path

import pytest

from docs.build_site import Site, stage
from tests.docs.pages import pages


def test_every_page_is_staged_with_its_pictures(tmp_path: Path) -> None:
    stage(tmp_path)
    for page in pages():
        assert (tmp_path / page.name).exists()
        for link in page.links():
            name = link.partition("#")[0]
            if name and "://" not in link:
                assert (tmp_path / page.name).parent.joinpath(name).resolve().exists(), link


GOOD = '<h2 id="here">Here</h2><a href="#here">x</a><a href="other.html#there">y</a>'
OTHER = '<h2 id="there">There</h2><a href="https://example.org/">to follow is not to load</a>'


@pytest.mark.parametrize(
    ("added", "fault"),
    [
        ("", ""),
        ('<a href="gone.html">x</a>', "page.html: gone.html leads nowhere"),
        ('<a href="other.html#gone">x</a>', "page.html: other.html#gone leads nowhere"),
        ('<a href="../page.html">x</a>', "page.html: ../page.html leads nowhere"),
        ('<img src="gone.png">', "page.html: gone.png leads nowhere"),
        (
            '<link rel="stylesheet" href="https://fonts.example.org/x.css">',
            "page.html: loads https://fonts.example.org/x.css",
        ),
        (
            '<script src="//cdn.example.org/x.js"></script>',
            "page.html: loads //cdn.example.org/x.js",
        ),
    ],
)
def test_what_a_reader_would_miss_is_a_fault(tmp_path: Path, added: str, fault: str) -> None:
    (tmp_path / "page.html").write_text(GOOD + added)
    (tmp_path / "other.html").write_text(OTHER)
    assert Site(tmp_path).faults() == [fault] * bool(fault)


def test_a_style_that_asks_another_host_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("@font-face { src: url('https://fonts.example.org/a.woff2') }")
    (tmp_path / "b.css").write_text("body { background: url(b.png), url(data:image/png;base64,) }")
    assert Site(tmp_path).faults() == ["a.css: loads https://fonts.example.org/a.woff2"]
