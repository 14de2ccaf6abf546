"""The part of an SGLang server's HTTP interface that is used here, with our errors."""

import asyncio
import json
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import httpx

from tinkercloud.cluster.rollout.generate import Served, sample_bodies, sample_output, target_bodies
from tinkercloud.cluster.rollout.token_streams import TokenStreams
from tinkercloud.core.types import SampleOutput, SampleRequest
from tinkercloud.errors import EngineDied, ServerFault, UserError

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 600.0
ABORT_TIMEOUT_S = 10.0


class EngineRefused(ServerFault):
    """The engine is alive and refused the call; the text is the engine's."""


class EngineClient:
    """Calls raise EngineDied when it cannot be reached, EngineRefused when it refuses them."""

    def __init__(self, url: str, served: Served, key: str):
        self.url = url
        self._served = served
        # No limit on connections: the engine queues requests and knows how many fit its batch.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {key}"},
            limits=limits,
            timeout=CALL_TIMEOUT_S,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def sample(
        self,
        adapter: str | None,
        request: SampleRequest,
        timeout_s: float,
        streams: TokenStreams | None = None,
    ) -> SampleOutput:
        """All samples of a request. Cancelled, it returns once the engine has dropped them. Raises
        Aborted, UserError, EngineDied."""
        committed = () if streams is None else streams.begin()
        samples = sample_bodies(request, adapter, self._served, committed)
        targets = target_bodies(request, adapter, self._served)
        bodies = [body | {"rid": uuid.uuid4().hex} for body in (*samples, *targets)]
        tasks = [
            asyncio.ensure_future(
                self._generate(body, timeout_s)
                if streams is None or index >= len(samples)
                else self._stream(body, timeout_s, partial(streams.take, index))
            )
            for index, body in enumerate(bodies)
        ]
        try:
            answers = await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            await asyncio.shield(self._abort([body["rid"] for body in bodies]))
            raise
        finally:
            # SGLang aborts a request whose connection is closed: nothing is generated in vain.
            for task in tasks:
                task.cancel()
        return sample_output(request, answers[: len(samples)], answers[len(samples) :])

    async def _abort(self, ids: Sequence[str]) -> None:
        """Returns once the engine runs none of them, or is gone: a gate that lets weights change
        behind a cancelled request must find the engine without it."""
        try:
            for request_id in ids:
                await self.call("/abort_request", {"rid": request_id}, ABORT_TIMEOUT_S)
            # Answered by the scheduler, which takes the aborts before it.
            await self.get("/server_info", ABORT_TIMEOUT_S)
        except ServerFault as error:
            logger.warning("a cancelled request was not aborted: %s", error)

    async def _stream(
        self, body: Mapping[str, Any], timeout_s: float, take: Callable[[Any], Any]
    ) -> Mapping[str, Any]:
        """As `_generate`, by events; take: of each, and returns the whole answer so far."""
        where, answer = f"{self.url}/generate", None
        post = self._http.stream(
            "POST", "/generate", json={**body, "stream": True}, timeout=timeout_s
        )
        try:
            async with post as response:
                if response.status_code >= 400:
                    await response.aread()
                    _content(response, where)
                async for line in response.aiter_lines():
                    event = _event(line, where)
                    answer = answer if event is None else take(event["meta_info"])
        except httpx.HTTPError as error:
            raise EngineDied(f"{where}: {type(error).__name__}: {error}") from error
        except EngineRefused as refused:
            raise UserError(str(refused)) from refused
        if answer is None or answer["meta_info"]["finish_reason"] is None:
            raise EngineDied(f"{where} ended a stream before its sample")
        return answer

    async def _generate(self, body: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        try:
            return await self.call("/generate", body, timeout_s)
        except EngineRefused as refused:
            raise UserError(str(refused)) from refused

    async def call(
        self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        """POST; returns the answer's JSON, None where it has no body."""
        try:
            answer = await self._http.post(path, json=body or {}, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise EngineDied(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        return _content(answer, f"{self.url}{path}")

    async def get(self, path: str, timeout_s: float) -> Any:
        """GET; as `call`."""
        try:
            answer = await self._http.get(path, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise EngineDied(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        return _content(answer, f"{self.url}{path}")

    async def healthy(self, timeout_s: float) -> bool:
        """Whether it generates a token, or is busy generating others (SGLang's /health)."""
        try:
            await self.get("/health", timeout_s)
        except ServerFault:
            return False
        return True


async def everywhere(
    clients: Sequence[EngineClient], path: str, body: Mapping[str, Any] | None = None
) -> list[Any]:
    """The same call to several engines at once. Returns or raises once all have answered: an engine
    that is still busy with a failed step must not get the next one."""
    calls = [client.call(path, body) for client in clients]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


def _content(answer: httpx.Response, where: str) -> Any:
    text = answer.text
    if answer.status_code >= 500:
        raise EngineDied(f"{where} answered {answer.status_code}: {text[:500]}")
    try:
        content = json.loads(text) if text else None
    except ValueError:
        content = None
    if answer.status_code >= 400:
        raise EngineRefused(f"{where}: {_message(content) or text[:500]}")
    if isinstance(content, dict) and content.get("success") is False:
        raise EngineRefused(f"{where}: {_message(content) or text[:500]}")
    return content


def _event(line: str, where: str) -> Any:
    """An event of a stream; None for what is none. Raises EngineRefused."""
    kind, _, text = line.partition(":")
    if kind != "data" or text.strip() == "[DONE]":
        return None
    event = json.loads(text)
    if "error" in event:
        raise EngineRefused(f"{where}: {_message(event)}")
    return event


def _message(content: Any) -> str | None:
    if not isinstance(content, dict):
        return None
    # SGLang's endpoints answer in three forms.
    text = content.get("message") or content.get("error_message") or content.get("error")
    return str(text.get("message", text)) if isinstance(text, dict) else text
