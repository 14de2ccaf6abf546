"""OpenAI's /completions."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from fastapi import APIRouter, Request, Response

from tinkercloud.chat.sample_parser import TextDelta
from tinkercloud.errors import InvalidField, NotFound
from tinkercloud.event_stream import EventStream, drain, server_sent, while_connected
from tinkercloud.openai_api.bodies import CompletionBody
from tinkercloud.openai_api.completion_answers import CompletionAnswers, completion_choices
from tinkercloud.openai_api.requests import AnswerForm, completion_form, completion_request
from tinkercloud.routers.deps import ServicesDep, UserDep, json_answer, large_json_answer
from tinkercloud.routers.http.json_route import JsonRoute
from tinkercloud.routers.openai import DONE, failed
from tinkercloud.services.chats.text_completion_service import CompletionRun

router = APIRouter(prefix="/oai/api/v1", route_class=JsonRoute)

_INSTEAD = {
    "responses": "Use chat.completions; agent frameworks have a model class or an option for it "
    "(openai-agents: OpenAIChatCompletionsModel)",
    "embeddings": "Serve an embedding model with another server",
}


@router.post("/completions")
async def completions(
    body: CompletionBody, request: Request, user: UserDep, services: ServicesDep
) -> Response:
    completion, form = completion_request(body), completion_form(body)
    scored = completion.echo and form.logprobs
    if form.stream and scored:
        text = "echo with logprobs is not streamed; leave stream out"
        raise InvalidField("echo", text)
    run = await services.chats.completions.begin(user, completion, prompt_logprobs=scored)
    if form.stream:
        return EventStream(_events(run, form), failed)
    return await while_connected(request, _whole(run, form))


@router.get("/{path:path}", include_in_schema=False)
@router.post("/{path:path}", include_in_schema=False)
async def unserved(path: str) -> Response:
    """After all routes of OpenAI's API that are served."""
    raise NotFound(
        f"OpenAI's /{path[:100]} is not served here; served: /models, /completions, "
        f"/chat/completions. {_INSTEAD.get(path.partition('/')[0], '')}".rstrip()
    )


def _answers(run: CompletionRun, form: AnswerForm) -> CompletionAnswers:
    prepared = run.prepared
    return CompletionAnswers(
        run.run_id, run.created, prepared.request.model, form, prepared.text.codec
    )


async def _whole(run: CompletionRun, form: AnswerForm) -> Response:
    await drain(run.events())
    if form.logprobs:  # a record for each token, and for each alternative
        return await large_json_answer(partial(_answer, run, form))
    return json_answer(_answer(run, form))


def _answer(run: CompletionRun, form: AnswerForm) -> object:
    prompts = [sample.prompt.tolist() for sample in run.prepared.samples]
    answers = _answers(run, form)
    choices = completion_choices(
        run.prepared.request, prompts, run.answers, run.outputs, answers.text_of
    )
    return answers.whole(choices, run.usage)


async def _events(run: CompletionRun, form: AnswerForm) -> AsyncGenerator[bytes, None]:
    answers, request = _answers(run, form), run.prepared.request
    num_samples = request.sampling.num_samples
    offsets = [0] * (num_samples * len(run.prepared.samples))
    if request.echo:
        for index in range(len(offsets)):
            prompt = run.prepared.samples[index // num_samples].prompt.tolist()
            text = answers.text_of(prompt)
            offsets[index] = len(text)
            yield server_sent(answers.echo(index, text))
    async with aclosing(run.events()) as events:
        async for event in events:
            if request.sampling.max_tokens == 0 and isinstance(event, TextDelta):
                continue
            for chunk in answers.event(event, offsets[event.index]):
                yield server_sent(chunk)
            if isinstance(event, TextDelta):
                offsets[event.index] += len(event.text)
    for chunk in answers.closing(run.usage):
        yield server_sent(chunk)
    yield DONE
