"""Weights out: links to exported files, and the one route that answers without a key."""

from email.utils import format_datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.responses import FileResponse, StreamingResponse

from tinker_gmi.types import CopyWeightsRequest, SaveWeightsExternalRequest
from tinkercloud.routers.deps import (
    SIGNED_PREFIX,
    CheckpointPathDep,
    OwnerDep,
    ServicesDep,
    UserDep,
    answer,
)
from tinkercloud.routers.http.json_route import JsonRoute
from tinkercloud.services.accounts.signed_links import SignedLink
from tinkercloud.services.checkpoints.copy_service import CopyHeaders
from tinkercloud.services.container import Services

router = APIRouter(prefix="/api/v1", route_class=JsonRoute)
signed = APIRouter()

BINARY = "application/octet-stream"
TAR = "application/x-tar"
_SIGNED_QUERY = ("reader", "expires", "signature")


@router.post("/save_weights_external")
async def save_weights_external(
    body: SaveWeightsExternalRequest, user: UserDep, services: ServicesDep
) -> Response:
    return answer(await services.training.save_weights_external(user, body))


@router.post("/copy_weights")
async def copy_weights(
    body: CopyWeightsRequest,
    user: UserDep,
    services: ServicesDep,
    x_idempotency_key: Annotated[str | None, Header()] = None,
    x_tinker_weights_access_token: Annotated[str | None, Header()] = None,
) -> Response:
    headers = CopyHeaders(x_idempotency_key, x_tinker_weights_access_token)
    return answer(await services.copies.copy(user, body, headers))


@router.get("/training_runs/{run_id}/checkpoints/{segment}/{name}/external_weights_urls")
async def external_weights_urls(
    path: CheckpointPathDep, user: OwnerDep, services: ServicesDep, request: Request
) -> Response:
    return answer(await services.downloads.external_urls(user, path, base_url(services, request)))


@router.get("/training_runs/{run_id}/checkpoints/{segment}/{name}/archive")
async def archive(
    path: CheckpointPathDep, user: OwnerDep, services: ServicesDep, request: Request
) -> Response:
    """302, which all SDKs that ask (up to 0.25) take; the body says the same."""
    link = await services.downloads.archive_url(user, path, base_url(services, request))
    response = answer(link, 302)
    response.headers["Location"] = link.url
    response.headers["Expires"] = format_datetime(link.expires, usegmt=True)
    return response


def base_url(services: Services, request: Request) -> str:
    """Where this client reaches the server, without a slash at the end."""
    return (services.config.public_url or str(request.base_url)).rstrip("/")


async def signed_link(request: Request) -> SignedLink:
    query = {name: request.query_params.get(name, "") for name in _SIGNED_QUERY}
    return SignedLink(**request.path_params, **query)


@signed.get(SIGNED_PREFIX + "{run_id}/{segment}/{name}/{generation}/{file}")
async def download(
    link: Annotated[SignedLink, Depends(signed_link)], services: ServicesDep
) -> Response:
    """The content, without a key: the link was signed for its reader. A single file in ranges too
    (RFC 9110, section 14)."""
    download = await services.downloads.open(link)
    if download.path is not None:
        return FileResponse(download.path, media_type=BINARY, filename=download.file)
    headers = {
        "Content-Length": str(download.parts.num_bytes),
        "Content-Disposition": f'attachment; filename="{download.file}"',
    }
    return StreamingResponse(download.parts.read(), media_type=TAR, headers=headers)
