"""Verification of drafts, and their training, beside OpenAI's API, which has neither."""

from fastapi import APIRouter, Request, Response

from tinkercloud.event_stream import while_connected
from tinkercloud.openai_api.bodies import TrainDraftBody, VerifyBody
from tinkercloud.openai_api.verification import drafted_prompt, verification_json
from tinkercloud.routers.deps import ObservedDep, ServicesDep, UserDep, json_answer
from tinkercloud.routers.http.json_route import JsonRoute

router = APIRouter(prefix="/oai/api/v1", route_class=JsonRoute)


@router.post("/verify")
async def verify(
    body: VerifyBody, request: Request, user: UserDep, services: ServicesDep
) -> Response:
    async def work() -> Response:
        verification = await services.chats.verifications.verify(user, drafted_prompt(body))
        return json_answer(verification_json(body.model, verification))

    return await while_connected(request, work())


@router.post("/train_draft")
async def train_draft(
    body: TrainDraftBody, user: UserDep, observed: ObservedDep, services: ServicesDep
) -> Response:
    """For those who see the whole server's numbers: a draft is everybody's."""
    sees_all = observed is None
    return json_answer(await services.chats.drafts.train(user, body.model, sees_all=sees_all))
