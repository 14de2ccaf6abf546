"""OpenAI's API: models, chat completions, completions."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from fastapi import APIRouter, Request, Response

from tinkercloud.chat.turn import TurnHooks
from tinkercloud.errors import TinkercloudError
from tinkercloud.event_stream import EventStream, drain, server_sent, while_connected
from tinkercloud.openai_api.bodies import ChatBody
from tinkercloud.openai_api.chat_answers import ChatAnswers
from tinkercloud.openai_api.models import model_json, models_json
from tinkercloud.openai_api.requests import AnswerForm, chat_form, chat_request
from tinkercloud.routers.capture_hooks import HeaderHooksDep
from tinkercloud.routers.deps import ServicesDep, UserDep, json_answer, large_json_answer
from tinkercloud.routers.http.error_forms import OPENAI_API, error_answer
from tinkercloud.routers.http.json_route import JsonRoute
from tinkercloud.services.chats.chat_service import ChatRun
from tinkercloud.services.container import Services

router = APIRouter(prefix="/oai/api/v1", route_class=JsonRoute)

DONE = b"data: [DONE]\n\n"


@router.get("/models")
async def models(user: UserDep, services: ServicesDep) -> Response:
    served, checkpoints = await services.chats.names.listed(user)
    dated = [(checkpoint.tinker_path, checkpoint.created_at) for checkpoint in checkpoints]
    return json_answer(models_json(served, dated, user))


@router.get("/models/{name:path}")
async def model(name: str, user: UserDep, services: ServicesDep) -> Response:
    await services.chats.names.resolve(user, name)
    return json_answer(model_json(name))


@router.post("/chat/completions")
async def chat_completions(
    body: ChatBody, request: Request, user: UserDep, services: ServicesDep, hooks: HeaderHooksDep
) -> Response:
    return await answer_chat(services, user, body, request, hooks)


async def answer_chat(
    services: Services, user: str, body: ChatBody, request: Request, hooks: TurnHooks | None = None
) -> Response:
    """hooks: who gives the prompt's tokens and gets the finished turn."""
    run = await services.chats.conversations.begin(user, chat_request(body), hooks)
    form = chat_form(body)
    if form.stream:
        return EventStream(_chat_events(run, form), failed)
    return await while_connected(request, _whole_chat(run, form))


def _answers(run: ChatRun, form: AnswerForm) -> ChatAnswers:
    prepared = run.prepared
    prompt = prepared.sample.prompt.tolist()
    return ChatAnswers(
        run.run_id, run.created, prepared.request.model, form, prepared.text.codec, prompt
    )


async def _whole_chat(run: ChatRun, form: AnswerForm) -> Response:
    await drain(run.events())
    if form.logprobs:  # a record for each token, and for each alternative
        return await large_json_answer(partial(_chat_answer, run, form))
    return json_answer(_chat_answer(run, form))


def _chat_answer(run: ChatRun, form: AnswerForm) -> object:
    return _answers(run, form).whole(run.answers, run.usage)


async def _chat_events(run: ChatRun, form: AnswerForm) -> AsyncGenerator[bytes, None]:
    answers = _answers(run, form)
    opening = answers.opening(run.prepared.sample.num_samples)
    async with aclosing(run.events()) as events:
        async for event in events:
            for chunk in (*opening, *answers.event(event)):
                yield server_sent(chunk)
    for chunk in answers.closing(run.usage):
        yield server_sent(chunk)
    yield DONE


def failed(error: TinkercloudError) -> bytes:
    """The last event of a stream that an error ends."""
    return server_sent(error_answer(OPENAI_API, error.status, str(error), error)[1])
