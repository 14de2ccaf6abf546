"""The console: a page with its files, and signing in to it."""

from fastapi import APIRouter, Request, Response

from tinkercloud.page_files import PageFiles
from tinkercloud.routers.console.cookie import SESSION_PATH, drop_cookie, keep_cookie
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

FILES = PageFiles({"": "console"})


@router.get(CONSOLE_PATH)
async def page() -> Response:
    return FILES.page()


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
