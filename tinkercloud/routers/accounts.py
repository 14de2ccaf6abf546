"""Tokens, and the key of the caller."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from tinker_gmi.types import AuthTokenRequest, AuthTokenResponse
from tinkercloud.routers.deps import ReaderDep, ServicesDep, UserDep, answer
from tinkercloud.routers.http.json_route import JsonRoute
from tinkercloud.routers.http.middleware import credential_of

router = APIRouter(prefix="/api/v1", route_class=JsonRoute)


async def credential(request: Request) -> str:
    return credential_of(request.headers)


CredentialDep = Annotated[str, Depends(credential)]


@router.post("/auth/token")
async def auth_token(
    body: AuthTokenRequest, credential: CredentialDep, user: ReaderDep, services: ServicesDep
) -> Response:
    return answer(AuthTokenResponse(jwt=services.accounts.token(user, credential)))


@router.get("/auth/apikey/me")
async def describe_key(credential: CredentialDep, user: UserDep, services: ServicesDep) -> Response:
    return answer(services.accounts.describe_key(user, credential))


@router.delete("/auth/apikey/me")
async def revoke_key(credential: CredentialDep, services: ServicesDep) -> Response:
    services.accounts.revoke_key(credential)
    return Response(status_code=204)
