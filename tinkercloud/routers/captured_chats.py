"""The OpenAI and Anthropic routes within a capture session, by its URL.

An agent's base URL is all that changes. Labels are in it too, for agents that set no headers:
/captures/ID/groups/TASK/episodes/NUMBER/oai/api/v1.
"""

from fastapi import APIRouter, Request, Response

from tinkercloud.anthropic_api.bodies import CountBody, MessagesBody
from tinkercloud.anthropic_api.requests import count_request
from tinkercloud.errors import InvalidField
from tinkercloud.openai_api.bodies import ChatBody
from tinkercloud.openai_api.models import model_json
from tinkercloud.routers.anthropic import answer_message
from tinkercloud.routers.capture_hooks import PathHooksDep
from tinkercloud.routers.deps import ServicesDep, UserDep, json_answer
from tinkercloud.routers.http.json_route import JsonRoute
from tinkercloud.routers.openai import answer_chat

router = APIRouter(prefix="/captures/{capture_id}", route_class=JsonRoute)

_LABELS = ("", "/episodes/{episode}", "/groups/{group}", "/groups/{group}/episodes/{episode}")
# Anthropic's client adds /v1 to its base URL, OpenAI's does not.
_OPENAI = tuple(f"{labels}/oai/api/v1" for labels in _LABELS)
_ANTHROPIC = tuple(f"{labels}/anthropic{api}/v1" for labels in _LABELS for api in ("", "/api"))


async def chat_completions(
    body: ChatBody, request: Request, user: UserDep, services: ServicesDep, hooks: PathHooksDep
) -> Response:
    return await answer_chat(services, user, body, request, hooks)


async def completions(hooks: PathHooksDep) -> Response:
    raise InvalidField(
        "prompt", "a capture session takes chats: send messages to its /chat/completions"
    )


async def messages(
    body: MessagesBody, request: Request, user: UserDep, services: ServicesDep, hooks: PathHooksDep
) -> Response:
    return await answer_message(services, user, body, request, hooks)


async def count_tokens(
    body: CountBody, user: UserDep, services: ServicesDep, hooks: PathHooksDep
) -> Response:
    num_tokens = await services.chats.conversations.num_prompt_tokens(
        user, count_request(body), hooks
    )
    return json_answer({"input_tokens": num_tokens})


async def models(hooks: PathHooksDep) -> Response:
    assert hooks.model is not None
    return json_answer({"object": "list", "data": [model_json(hooks.model)]})


async def model(name: str, hooks: PathHooksDep) -> Response:
    """Any name: it is a label here."""
    return json_answer(model_json(name))


for _prefix in _OPENAI:
    router.add_api_route(f"{_prefix}/chat/completions", chat_completions, methods=["POST"])
    router.add_api_route(f"{_prefix}/completions", completions, methods=["POST"])
    router.add_api_route(f"{_prefix}/models", models, methods=["GET"])
    router.add_api_route(f"{_prefix}/models/{{name:path}}", model, methods=["GET"])
for _prefix in _ANTHROPIC:
    router.add_api_route(f"{_prefix}/messages", messages, methods=["POST"])
    router.add_api_route(f"{_prefix}/messages/count_tokens", count_tokens, methods=["POST"])
