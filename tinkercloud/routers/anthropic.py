"""Anthropic's API: messages, their length, models."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime

from fastapi import APIRouter, Request, Response

from tinkercloud.anthropic_api.answers import MessageStream, message_json
from tinkercloud.anthropic_api.bodies import CountBody, MessagesBody
from tinkercloud.anthropic_api.requests import chat_request, count_request
from tinkercloud.chat.turn import TurnHooks
from tinkercloud.errors import NotFound, TinkercloudError
from tinkercloud.event_stream import EventStream, drain, server_sent, while_connected
from tinkercloud.routers.capture_hooks import HeaderHooksDep
from tinkercloud.routers.deps import ReaderDep, ServicesDep, UserDep, json_answer
from tinkercloud.routers.http.error_forms import ANTHROPIC_API, error_answer
from tinkercloud.routers.http.json_route import JsonRoute
from tinkercloud.services.chats.chat_service import ChatRun
from tinkercloud.services.container import Services

router = APIRouter(prefix="/anthropic/api/v1", route_class=JsonRoute)

PING = server_sent({"type": "ping"}, "ping")


@router.post("/messages")
async def messages(
    body: MessagesBody,
    request: Request,
    user: UserDep,
    services: ServicesDep,
    hooks: HeaderHooksDep,
) -> Response:
    return await answer_message(services, user, body, request, hooks)


async def answer_message(
    services: Services,
    user: str,
    body: MessagesBody,
    request: Request,
    hooks: TurnHooks | None = None,
) -> Response:
    """hooks: who gives the prompt's tokens and gets the finished turn."""
    run = await services.chats.conversations.begin(user, chat_request(body), hooks)
    if body.stream:
        return EventStream(_events(run), _failed, heartbeat=PING)
    return await while_connected(request, _whole(run))


@router.post("/messages/count_tokens")
async def count_tokens(body: CountBody, user: ReaderDep, services: ServicesDep) -> Response:
    num_tokens = await services.chats.conversations.num_prompt_tokens(user, count_request(body))
    return json_answer({"input_tokens": num_tokens})


@router.get("/models")
async def models(user: UserDep, services: ServicesDep) -> Response:
    served, checkpoints = await services.chats.names.listed(user)
    dated = [(model.name, 0.0) for model in served]
    dated += [(checkpoint.tinker_path, checkpoint.created_at) for checkpoint in checkpoints]
    data = [_model(name, created) for name, created in dated]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return json_answer({"data": data, "has_more": False, **ends})


@router.get("/models/{name:path}")
async def model(name: str, user: UserDep, services: ServicesDep) -> Response:
    await services.chats.names.resolve(user, name)
    return json_answer(_model(name, 0.0))


@router.get("/{path:path}", include_in_schema=False)
@router.post("/{path:path}", include_in_schema=False)
async def unserved(path: str) -> Response:
    """After all routes of Anthropic's API that are served."""
    raise NotFound(
        f"Anthropic's /{path[:100]} is not served here; served: /messages, /messages/count_tokens, "
        "/models"
    )


def _model(name: str, created: float) -> dict[str, str]:
    date = datetime.fromtimestamp(created, UTC).isoformat()
    return {"type": "model", "id": name, "display_name": name, "created_at": date}


async def _whole(run: ChatRun) -> Response:
    await drain(run.events())
    name = run.prepared.request.model
    return json_answer(message_json(run.run_id, name, run.answers[0], run.usage))


async def _events(run: ChatRun) -> AsyncGenerator[bytes, None]:
    stream = MessageStream(run.run_id, run.prepared.request.model)
    opening = stream.opening(run.prompt_tokens)
    async with aclosing(run.events()) as events:
        async for event in events:
            for name, body in (*opening, *stream.event(event)):
                yield server_sent(body, name)
    for name, body in stream.closing(run.usage):
        yield server_sent(body, name)


def _failed(error: TinkercloudError) -> bytes:
    body = error_answer(ANTHROPIC_API, error.status, str(error), error)[1]
    return server_sent(body, "error")
