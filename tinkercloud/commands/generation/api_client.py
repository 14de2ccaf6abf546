"""A text client of a running server's OpenAI API: answers as they are written, and their times."""

import argparse
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tinkercloud.commands.options import Arguments
from tinkercloud.errors import UserError

if TYPE_CHECKING:
    import httpx

HERE = "http://127.0.0.1:8700"
START = "data: "
DONE = "[DONE]"
# What a model wrote must not move the cursor, colour the screen or type for its reader.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        help="a base model, a tinker:// path, or a sampling session [the first that is served]",
    )
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer [256]")
    parser.add_argument("--temperature", type=float, help="0: the likeliest tokens [1]")
    parser.add_argument("--top-p", type=float, help="share of the probability to draw from [1]")
    parser.add_argument("--seed", type=int, help="the same seed draws the same tokens")
    parser.add_argument("--url", help=f"the server [TINKER_BASE_URL, else {HERE}]")
    parser.add_argument("--key", help="an API key [TINKER_API_KEY]")


def sampling_fields(arguments: Arguments) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "seed")
    return {name: arguments[name] for name in names if arguments[name] is not None}


@dataclass
class Answer:
    """One answer: first_s and all_s are seconds from the request to its first and last token."""

    text: str = ""
    num_tokens: int = 0
    finish_reason: str = ""
    first_s: float = 0.0
    all_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """After the first token: the speed of sampling, without that of the prompt."""
        spent_s = self.all_s - self.first_s
        return (self.num_tokens - 1) / spent_s if self.num_tokens > 1 and spent_s > 0 else 0.0


@dataclass
class ApiClient:
    """A server, by its address and a key. Use it as a context manager."""

    url: str
    key: str
    http: "httpx.Client" = field(init=False)

    def __post_init__(self) -> None:
        import httpx

        # The environment's proxies are for elsewhere. Answers may take as long as they like.
        self.http = httpx.Client(
            base_url=self.url,
            headers=_credentials(self.key),
            trust_env=False,
            timeout=httpx.Timeout(30.0, read=None),
        )

    def __enter__(self) -> "ApiClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def models(self) -> list[str]:
        """Base models and the caller's checkpoints."""
        return [each["id"] for each in self.get("/oai/api/v1/models")["data"]]

    def get(self, path: str) -> Any:
        return self._answered("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._answered("POST", path, body)

    def _answered(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        import httpx

        try:
            response = self.http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise UserError(f"{self.url}: {error or type(error).__name__}") from error
        if response.is_error:
            raise self._refusal(response)
        return response.json()

    def _refusal(self, response: "httpx.Response") -> UserError:
        missing = response.status_code == 401 and not self.key
        reason = "give an API key by TINKER_API_KEY or --key" if missing else _reason(response)
        return UserError(f"{self.url}: {reason}")

    def stream(self, path: str, body: Mapping[str, Any], answer: Answer) -> Iterator[str]:
        """The text in the pieces that come; `answer` is filled meanwhile."""
        import httpx

        whole = {**body, "stream": True, "stream_options": {"include_usage": True}}
        start = time.monotonic()
        try:
            with self.http.stream("POST", f"/oai/api/v1/{path}", json=whole) as response:
                if response.is_error:
                    response.read()
                    raise self._refusal(response)
                for event in _events(response.iter_lines()):
                    piece = _piece(event, answer)
                    answer.all_s = time.monotonic() - start
                    if piece:
                        answer.first_s = answer.first_s or answer.all_s
                        answer.text += piece
                        yield piece
        except httpx.HTTPError as error:
            raise UserError(f"{self.url}: {error or type(error).__name__}") from error


def opened(arguments: Arguments) -> ApiClient:
    url = arguments["url"] or os.environ.get("TINKER_BASE_URL") or HERE
    return ApiClient(url.rstrip("/"), arguments["key"] or os.environ.get("TINKER_API_KEY") or "")


def chosen_model(client: ApiClient, named: str | None) -> str:
    """Raises UserError where none is named and the server has none."""
    if named is not None:
        return named
    models = client.models()
    if not models:
        raise UserError(f"{client.url} serves no model")
    return models[0]


def shown(text: str) -> str:
    """For a terminal: control characters but line ends and tabs are replaced."""
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def _credentials(key: str) -> dict[str, str]:
    """Headers; none without a key, which a server may do without (`--no-auth`)."""
    return {"X-API-Key": key, "Authorization": f"Bearer {key}"} if key else {}


def _events(lines: Iterator[str]) -> Iterator[Mapping[str, Any]]:
    """Raises UserError where the server ends a stream by an error."""
    for line in lines:
        if not line.startswith(START):
            continue
        text = line.removeprefix(START)
        if text == DONE:
            return
        event = json.loads(text)
        if "error" in event:
            raise UserError(str(event["error"].get("message", event["error"])))
        yield event


def _piece(event: Mapping[str, Any], answer: Answer) -> str:
    if event.get("usage"):
        answer.num_tokens = event["usage"]["completion_tokens"]
    text = ""
    for choice in event["choices"]:
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        delta = choice.get("delta", choice)  # completions have `text` in the choice itself
        text += delta.get("reasoning_content") or ""
        text += delta.get("content") or delta.get("text") or ""
    return text


def _reason(response: "httpx.Response") -> str:
    try:
        body = response.json()
    except ValueError:
        return f"HTTP {response.status_code}"
    error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)
