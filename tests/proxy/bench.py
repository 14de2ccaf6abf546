"""A proxy in this process between clients and scripted servers of texts."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import openai
from fastapi import FastAPI

from tests.proxy.scripted_server import ScriptedServer
from tinkercloud.chat.text_model import TextModel
from tinkercloud.proxy.app import create_proxy_app
from tinkercloud.proxy.opening import ProxyOptions, opened
from tinkercloud.proxy.suffix_source import SuffixSource
from tinkercloud.proxy.upstream import UpstreamAddress

QUESTION = [{"role": "user", "content": "Hello"}]
GREEDY = {"model": "scripted", "temperature": 0, "max_tokens": 24}


class TextServer(ScriptedServer):
    """Texts of the made tokenizer."""

    text: TextModel

    def tokens_of(self, prompt: str | list[int]) -> list[int]:
        return prompt if isinstance(prompt, list) else self.text.codec.encode(prompt, bos=True)

    def text_of(self, tokens: list[int]) -> str:
        return b"".join(map(self.text.codec.bytes_of, tokens)).decode(errors="replace")

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        if "messages" in body:
            return {"object": "chat.completion", "choices": [], "passed": body}
        answer = super().completion(body)
        tokens = self.drawn(self.tokens_of(body["prompt"]), body["max_tokens"], body, None)
        answer["choices"][0]["text"] = self.text_of(tokens)
        return answer


@dataclass
class Bench:
    """servers by host. said: the lines of the start."""

    folder: Path
    target: TextServer
    draft: TextServer
    said: list[str] = field(default_factory=list)

    def route(self, request: httpx.Request) -> httpx.Response:
        servers = {s.address.base_url.split("/")[2]: s for s in (self.target, self.draft)}
        return servers[request.url.host].answer(request)

    def options(self, **changes: Any) -> ProxyOptions:
        given = ProxyOptions(self.target.address, (self.draft.address,), tokenizer=self.folder)
        return replace(given, **changes)

    def app(self, key: str | None = None, **changes: Any) -> FastAPI:
        options = self.options(**changes)
        transport = httpx.MockTransport(self.route)
        # The clock stands still: costs are not known, and every draft is verified.
        return create_proxy_app(
            lambda: opened(options, self.said.append, lambda: transport, lambda: 0.0), key
        )

    @asynccontextmanager
    async def proxy(
        self, key: str | None = None, **changes: Any
    ) -> AsyncIterator[httpx.AsyncClient]:
        app = self.app(key, **changes)
        async with app.router.lifespan_context(app):
            inside = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=inside, base_url="http://proxy") as http:
                yield http

    def alone(self, prompt: str, num: int) -> str:
        tokens = self.target.tokens_of(prompt)
        return self.target.text_of(self.target.model.alone(tokens, num))


@asynccontextmanager
async def alone_and_through(
    url: str, folder: Path, most_drafted: int
) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    """Clients of a real server at a base URL, and of a proxy before it with drafts of the text.
    folder: with its tokenizer."""
    options = ProxyOptions(
        UpstreamAddress(url), local=(SuffixSource(),), tokenizer=folder,
        most_drafted=most_drafted, allow_private=True,
    )  # fmt: skip
    # Its clock stands still: costs are not known, and every draft is verified.
    app = create_proxy_app(lambda: opened(options, print, clock=lambda: 0.0))
    inside = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(base_url=url, timeout=300.0, trust_env=False) as alone,
        httpx.AsyncClient(transport=inside, base_url="http://proxy/v1") as through,
    ):
        yield alone, through


def client(http: httpx.AsyncClient, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://proxy/v1", api_key=key, http_client=http, max_retries=0
    )


Made = Callable[..., Bench]
