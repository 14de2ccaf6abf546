"""Pages that the package brings for browsers: their files, read once, and the headers that keep
anything but these files from running in them."""

from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from starlette.responses import Response

from tinkercloud.errors import NotFound

HEADERS = {
    # What a model wrote is data here: no script but these files', and no request to elsewhere.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
PAGE = "index.html"
KINDS = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


class PageFiles:
    """of: by path below the page's address, a folder or a file within the package. "": at that
    address itself. One of them has the page, index.html."""

    def __init__(self, of: Mapping[str, str]):
        root = resources.files("tinkercloud")
        self._contents = {
            path: content
            for prefix, source in of.items()
            for path, content in _contents(root / source, prefix)
        }

    def page(self) -> Response:
        return self.answer(PAGE)

    def answer(self, path: str) -> Response:
        """Raises NotFound."""
        if path not in self._contents:
            raise NotFound(f"the page has no file {path!r}")
        kind = KINDS.get(PurePosixPath(path).suffix, "text/plain")
        return Response(self._contents[path], media_type=kind, headers=HEADERS)


def _contents(source: Traversable, path: str) -> list[tuple[str, bytes]]:
    if source.is_file():
        return [(path, source.read_bytes())]
    files: list[tuple[str, bytes]] = []
    for entry in source.iterdir():
        files += _contents(entry, f"{path}/{entry.name}".removeprefix("/"))
    return files
