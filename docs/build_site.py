"""Builds the documentation site from the pages of the repository: `make docs`.

The pages keep their paths, so that their links to each other need no change. What is built is then
looked at as a browser would: each link leads to a file and an anchor that are there, and nothing is
loaded from another host.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "docs" / "zensical.toml"
# In the package, so that a server finds it, and a wheel that is built afterwards carries it.
TARGET = ROOT / "tinkercloud" / "docs_site"
PAGES = ("README.md", "LICENSE", "cookbook/*.md", "cookbook/*.png", "benchmarks/*.md", "docs/**/*")
NO_PAGES = {".py", ".pyc", ".toml"}
# Attributes that a browser loads by itself; `href` of a link that a reader follows is not one.
LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}
ELSEWHERE = re.compile(r"(?:https?:)?//")
LOADED_BY_STYLE = re.compile(r"(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\"')]+)")


def stage(folder: Path) -> None:
    """Copies the pages, and files that lie beside them, to where the generator reads."""
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file() and path.suffix not in NO_PAGES:
                target = folder / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)


class BuiltPage(HTMLParser):
    """anchors: of its elements. loaded, links: addresses as they are written."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        self.anchors, self.loaded, self.links = set[str](), list[str](), list[str]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        for name, value in values.items():
            if (tag, name) in LOADED and values.get("rel") != "canonical":
                self.loaded.append(value)
            elif (tag, name) == ("a", "href"):
                self.links.append(value)


class Site:
    """A folder of built pages."""

    def __init__(self, folder: Path):
        self._folder = folder

    @cached_property
    def _pages(self) -> dict[Path, BuiltPage]:
        paths = sorted(self._folder.rglob("*.html"))
        return {path: BuiltPage(path) for path in paths if path.name != "404.html"}

    def faults(self) -> list[str]:
        """What a reader would miss, in one line each."""
        return [*self._broken(), *self._loaded_from_elsewhere()]

    def _broken(self) -> Iterator[str]:
        for path, page in self._pages.items():
            for address in {*page.links, *page.loaded}:
                if not re.match(r"[a-z]+:|//", address) and not self._exists(path, address):
                    yield f"{path.relative_to(self._folder)}: {address} leads nowhere"

    def _exists(self, page: Path, address: str) -> bool:
        name, _, anchor = unquote(address).partition("#")
        target = (page.parent / name.partition("?")[0]).resolve() if name else page
        target = target / "index.html" if target.is_dir() else target
        if not target.is_relative_to(self._folder.resolve()) or not target.exists():
            return False
        return not anchor or target not in self._pages or anchor in self._pages[target].anchors

    def _loaded_from_elsewhere(self) -> Iterator[str]:
        for path, page in self._pages.items():
            for address in filter(ELSEWHERE.match, page.loaded):
                yield f"{path.relative_to(self._folder)}: loads {address}"
        for path in sorted(self._folder.rglob("*.css")):
            for address in LOADED_BY_STYLE.findall(path.read_text(encoding="utf-8")):
                yield f"{path.relative_to(self._folder)}: loads {address}"


def main() -> int:
    with TemporaryDirectory() as folder:
        project = Path(folder).resolve()
        stage(project / "pages")
        shutil.copyfile(CONFIG, project / CONFIG.name)
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        if subprocess.run(command, cwd=project).returncode:
            return 1
        faults = Site(project / "site").faults()
        if faults:
            sys.stderr.write("\n".join((*faults, f"{len(faults)} faults in the built site\n")))
            return 1
        shutil.rmtree(TARGET, ignore_errors=True)
        shutil.copytree(project / "site", TARGET)
    return 0


if __name__ == "__main__":
    sys.exit(main())
