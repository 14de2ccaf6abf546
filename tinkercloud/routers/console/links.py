"""Where the SDK's console URLs land once their origin is this server's: on the console's views.

`get_console_url()` of the SDK names the vendor's host, which nothing outside the SDK changes; its
paths are the same here.
"""

import re
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response

from tinkercloud.routers.deps import CONSOLE_PATH

router = APIRouter(include_in_schema=False)

PATHS = re.compile(r"/(sessions|training_runs|checkpoints|playground|keys)(/.*)?")


def _view(request: Request, view: str) -> Response:
    """view: what the console's address has after "#". Relative, so that a proxy's prefix is kept;
    the steps up are those of the path as it was sent, where a slash in a name is `%2F`."""
    up = "../" * (request.scope["raw_path"].count(b"/") - 1)
    location = f"{up}{CONSOLE_PATH[1:]}#{quote(view, safe='/:?=')}"
    return Response(status_code=303, headers={"Location": location})


@router.get("/sessions")
async def sessions(request: Request) -> Response:
    return _view(request, "sessions")


@router.get("/sessions/{session_id}")
async def session(request: Request, session_id: str) -> Response:
    return _view(request, f"sessions/{session_id}")


@router.get("/training_runs/{run_id}")
async def training_run(request: Request, run_id: str) -> Response:
    return _view(request, f"runs/{run_id}")


@router.get("/checkpoints/{run_id}/{segment}/{name}")
async def checkpoint(request: Request, run_id: str) -> Response:
    return _view(request, f"runs/{run_id}")


@router.get("/playground")
async def playground(request: Request, checkpoint: Annotated[str, Query()] = "") -> Response:
    return _view(request, f"chat?model={checkpoint}" if checkpoint else "chat")


@router.get("/keys")
@router.get("/keys/{key_id}")
async def keys(request: Request) -> Response:
    return _view(request, "keys")
