"""Pages where the SDK's console URLs land once their origin is this server's.

`get_console_url()` of the SDK names the vendor's host, which nothing outside the SDK changes; its
paths are the same here. A browser asks for the API key (as the password of HTTP Basic
authentication, which only these pages take), and sees what the API would show that user.
"""

import base64
import binascii
import re
from html import escape
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Query, Response

from tinkercloud.routers.deps import ServicesDep, UserDep

router = APIRouter()

PATHS = re.compile(r"/(sessions|training_runs|checkpoints|playground|keys)(/.*)?")
CHALLENGE = {"www-authenticate": 'Basic realm="tinkercloud: an API key as the password"'}
NUM_LISTED = 100
# No script, no style, no request to anywhere: what users named is shown and cannot act.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; form-action 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}


def basic_password(authorization: str) -> str:
    """The password of an HTTP Basic header (RFC 7617); "" where there is none."""
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(encoded, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _page(title: str, *blocks: str) -> Response:
    body = "\n".join(blocks)
    html = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<h1>{escape(title)}</h1>\n{body}\n</html>"
    )
    return Response(html, media_type="text/html; charset=utf-8", headers=HEADERS)


def _table(rows: dict[str, object]) -> str:
    cells = "".join(
        f"<tr><th>{escape(name)}<td>{escape(str(value))}"
        for name, value in rows.items()
        if value not in (None, "", {})
    )
    return f"<table>{cells}</table>"


def _links(heading: str, up: str, paths: list[str]) -> str:
    """up: from the page to the root, so that a prefix of a proxy is kept."""
    items = "".join(f'<li><a href="{up}{quote(path)}">{escape(path)}</a>' for path in paths)
    return f"<h2>{escape(heading)}</h2><ul>{items or '<li>none'}</ul>"


@router.get("/sessions")
async def sessions(user: UserDep, services: ServicesDep) -> Response:
    listed = await services.sessions.list(user, NUM_LISTED, 0)
    states = await services.session_search.states(listed)
    return _page(
        "Sessions",
        _links("newest", "", [f"sessions/{session_id}" for session_id in states]),
        _table({name: state for name, state in states.items() if state != "active"}),
    )


@router.get("/sessions/{session_id}")
async def session(session_id: str, user: UserDep, services: ServicesDep) -> Response:
    session = await services.sessions.get(user, session_id)  # refuses another user's
    states = await services.session_search.states([session])
    runs, samplers = await services.rest.session_contents(user, session_id)
    return _page(
        f"Session {session_id}",
        _links("training runs", "../", [f"training_runs/{run}" for run in runs]),
        _table({"state": states[session_id], "samplers": ", ".join(samplers)}),
    )


@router.get("/training_runs/{run_id}")
async def training_run(run_id: str, user: UserDep, services: ServicesDep) -> Response:
    run = await services.rest.training_run(user, run_id)
    listed = (await services.rest.checkpoints_of_run(user, run_id)).checkpoints
    return _page(
        f"Training run {run_id}",
        _table(
            {
                "base model": run.base_model,
                "LoRA rank": run.lora_rank,
                "last request": run.last_request_time,
                "metadata": run.user_metadata,
            }
        ),
        _links("checkpoints", "../", [f"checkpoints/{run_id}/{c.checkpoint_id}" for c in listed]),
    )


@router.get("/checkpoints/{run_id}/{segment}/{name}")
async def checkpoint(
    run_id: str, segment: str, name: str, user: UserDep, services: ServicesDep
) -> Response:
    path = f"tinker://{run_id}/{segment}/{name}"
    saved = await services.checkpoints.resolve(user, path)
    return _page(
        f"Checkpoint {segment}/{name}",
        _links("of the training run", "../../../", [f"training_runs/{run_id}"]),
        _table(
            {
                "path": saved.tinker_path,
                "base model": saved.base_model,
                "bytes": saved.size_bytes,
                "published": saved.public,
                "metadata": dict(saved.user_metadata),
            }
        ),
        f"<pre>tinker checkpoint info {escape(path)}</pre>",
    )


@router.get("/playground")
async def playground(
    user: UserDep, services: ServicesDep, checkpoint: Annotated[str, Query()] = ""
) -> Response:
    saved = await services.checkpoints.resolve(user, checkpoint)
    return _page(
        "Sampling a checkpoint",
        "<p>There is no playground here. Any chat program that speaks the OpenAI API samples this "
        "checkpoint: base URL this server's with /oai/api/v1, your key, and the model</p>",
        f"<pre>{escape(saved.tinker_path)}</pre>",
    )


@router.get("/keys")
@router.get("/keys/{key_id}")
async def keys(user: UserDep) -> Response:
    return _page(
        "API keys",
        "<p>Whoever runs the server makes and revokes keys, on its machine:</p>",
        "<pre>tinkercloud keys add\ntinkercloud keys list\ntinkercloud keys revoke KEY_ID</pre>",
    )
