"""The console: a page with its files, and signing in to it."""

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from fastapi import APIRouter, Request, Response

from tinkercloud.errors import NotFound
from tinkercloud.routers.console_cookie import SESSION_PATH, drop_cookie, keep_cookie
from tinkercloud.routers.deps import (
    CONSOLE_PATH,
    CONSOLE_PREFIX,
    KEY_ID_KEY,
    ROLE_KEY,
    ReaderDep,
    ServicesDep,
    json_answer,
)
from tinkercloud.routers.docs_site import has_pages
from tinkercloud.routers.downloads import base_url

# The page's own interface, which changes with it: no part of the API's document.
router = APIRouter(include_in_schema=False)

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


class Files:
    """What the package has in its folder `console`, read once. By path within it."""

    def __init__(self) -> None:
        self._contents = dict(_contents(resources.files("tinkercloud") / "console", ""))

    def answer(self, path: str) -> Response:
        """Raises NotFound."""
        if path not in self._contents:
            raise NotFound(f"the console has no file {path!r}")
        kind = KINDS.get(PurePosixPath(path).suffix, "text/plain")
        return Response(self._contents[path], media_type=kind, headers=HEADERS)


def _contents(folder: Traversable, prefix: str) -> list[tuple[str, bytes]]:
    files: list[tuple[str, bytes]] = []
    for entry in folder.iterdir():
        path = prefix + entry.name
        if entry.is_dir():
            files += _contents(entry, f"{path}/")
        else:
            files.append((path, entry.read_bytes()))
    return files


FILES = Files()


@router.get(CONSOLE_PATH)
async def page() -> Response:
    return FILES.answer(PAGE)


@router.get(CONSOLE_PREFIX + "{path:path}")
async def file(path: str) -> Response:
    return FILES.answer(path)


@router.get(SESSION_PATH)
async def whoami(user: ReaderDep, request: Request, services: ServicesDep) -> Response:
    """docs: whether `/docs-site` has pages."""
    role, auth, docs = request.scope[ROLE_KEY], services.config.auth, has_pages()
    return json_answer({"user": user, "role": role, "auth": auth, "docs": docs})


@router.post(SESSION_PATH)
async def sign_in(user: ReaderDep, request: Request, services: ServicesDep) -> Response:
    """With the key in a header, which a form of another site cannot send."""
    response = json_answer({"user": user, "role": request.scope[ROLE_KEY]})
    renew_cookie(response, request, services)
    return response


@router.delete(SESSION_PATH)
async def sign_out(user: ReaderDep) -> Response:
    response = Response(status_code=204)
    drop_cookie(response)
    return response


def renew_cookie(response: Response, request: Request, services: ServicesDep) -> None:
    """Good for another hour. Nothing where the server asks for no key."""
    if services.config.auth:
        token = services.accounts.console_token(request.scope[KEY_ID_KEY])
        secure = base_url(services, request).startswith("https://")
        keep_cookie(response, token, secure=secure)
