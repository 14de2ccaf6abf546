"""How fast a pool is: prompts and tokens per second of requests that run side by side."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

REQUEST_S = 600.0
_FIRST_TOKEN, _NUM_TOKENS = 100, 1000  # ordinary ones in every vocabulary


@dataclass(frozen=True, slots=True)
class Load:
    requests: int
    concurrency: int
    prompt_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Figures:
    """tokens_per_s: of all requests over the wall time, prompts included in that time; the others
    are means over requests of what llama-server reports. failures: reason -> requests."""

    completed: int
    failures: dict[str, int]
    wall_s: float
    tokens_per_s: float
    prompt_tokens_per_s: float
    decode_tokens_per_s: float

    def line(self) -> str:
        failed = sum(self.failures.values())
        text = (
            f"{self.tokens_per_s:.1f} tokens/s over {self.completed} requests in {self.wall_s:.1f} "
            f"s; a request: prompt {self.prompt_tokens_per_s:.1f}, "
            f"output {self.decode_tokens_per_s:.1f} tokens/s"
        )
        return f"{text}; {failed} failed: {self.failures}" if failed else text


def measure(
    url: str, load: Load, key: str | None, report: Callable[[str], None] = lambda _: None
) -> Figures:
    """url: of the endpoint, with /v1. Every request counts, those that fail by their reason."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with (
        httpx.Client(base_url=url, headers=headers, timeout=REQUEST_S, trust_env=False) as client,
        ThreadPoolExecutor(load.concurrency) as executor,
    ):
        _ask(client, load, 0)  # whatever the first request pays for once
        began = time.monotonic()
        pending = [executor.submit(_ask, client, load, n) for n in range(1, load.requests + 1)]
        answers = list[dict[str, Any] | str]()
        for number, future in enumerate(pending, start=1):
            answers.append(future.result())
            report(f"{number} of {load.requests} requests, {time.monotonic() - began:.1f} s")
        wall_s = time.monotonic() - began
    timings = [answer for answer in answers if isinstance(answer, dict)]
    failures: dict[str, int] = {}
    for answer in answers:
        if isinstance(answer, str):
            failures[answer] = failures.get(answer, 0) + 1
    return Figures(
        completed=len(timings),
        failures=failures,
        wall_s=wall_s,
        tokens_per_s=sum(each["predicted_n"] for each in timings) / wall_s,
        prompt_tokens_per_s=_mean([each["prompt_per_second"] for each in timings]),
        decode_tokens_per_s=_mean([each["predicted_per_second"] for each in timings]),
    )


def _ask(client: httpx.Client, load: Load, number: int) -> dict[str, Any] | str:
    """llama-server's timings, or why there are none. Prompts differ, so that none is cached."""
    start = number * 7919
    prompt = [_FIRST_TOKEN + (start + n * n) % _NUM_TOKENS for n in range(load.prompt_tokens)]
    body = {"prompt": prompt, "max_tokens": load.tokens, "temperature": 0}
    body |= {"cache_prompt": False, "ignore_eos": True}
    try:
        answer = client.post("/completions", json=body)
        return answer.raise_for_status().json()["timings"]
    except httpx.HTTPStatusError as error:
        return f"status {error.response.status_code}"
    except (httpx.HTTPError, KeyError, ValueError) as error:
        return type(error).__name__


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
