"""The project's Markdown pages, taken apart: blocks of code, spans of code, headings, links."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.serving import ROOT

FOLDERS = ("docs", "cookbook", "benchmarks")
PARTS = ROOT / "benchmarks" / "results"  # prose that `benchmarks.render` puts into pages
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.M)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_IMAGE_SOURCE = re.compile(r"\b(?:src|srcset)=\"([^\"]+)\"")


@dataclass(frozen=True)
class Page:
    """path: absolute."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def prose(self) -> str:
        """Without blocks of code."""
        return _FENCE.sub("", self.text)

    def blocks(self, language: str) -> list[str]:
        """The blocks of code in a language, without the indentation of a list they stand in."""
        return [
            re.sub(rf"^{indent}", "", code, flags=re.M)
            for indent, kind, code in _FENCE.findall(self.text)
            if kind == language
        ]

    def spans(self) -> list[str]:
        """Code within lines. A span that a line break cuts is one."""
        return [re.sub(r"\s+", " ", span) for span in _SPAN.findall(self.prose)]

    def links(self) -> list[str]:
        prose = _SPAN.sub("", self.prose)
        return [*_LINK.findall(prose), *_IMAGE_SOURCE.findall(prose)]

    def anchors(self) -> set[str]:
        """As the usual renderers of Markdown name headings."""
        anchors: set[str] = set()
        for heading in _HEADING.findall(self.prose):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
            slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            repeated = (f"{slug}-{number}" for number in range(1, 100))
            anchors.add(next(name for name in (slug, *repeated) if name not in anchors))
        return anchors


def pages() -> list[Page]:
    return [Page(path) for path in _paths()]


def _paths() -> Iterator[Path]:
    yield ROOT / "README.md"
    for folder in FOLDERS:
        yield from sorted(set((ROOT / folder).rglob("*.md")) - set(PARTS.glob("*.md")))
