"""Verification of drafts, beside OpenAI's API, which has none."""

from fastapi import APIRouter, Request, Response

from tinkercloud.event_stream import while_connected
from tinkercloud.openai_api.bodies import VerifyBody
from tinkercloud.openai_api.verification import drafted_prompt, verification_json
from tinkercloud.routers.deps import ServicesDep, UserDep, json_answer
from tinkercloud.routers.json_route import JsonRoute

router = APIRouter(prefix="/oai/api/v1", route_class=JsonRoute)


@router.post("/verify")
async def verify(
    body: VerifyBody, request: Request, user: UserDep, services: ServicesDep
) -> Response:
    async def work() -> Response:
        verification = await services.verifications.verify(user, drafted_prompt(body))
        return json_answer(verification_json(body.model, verification))

    return await while_connected(request, work())
