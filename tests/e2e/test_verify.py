"""Drafts over HTTP, verified by a server with its defaults and real weights."""

import httpx
import pytest

from tests.e2e.clients import MODEL
from tests.serving import Server
from tinkercloud.embedded.native.compiler import library

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler here")

OAI = "/oai/api/v1"
PROMPT = "Once a lighthouse keeper wrote down the weather of every day of the year: "
NUM_TOKENS, NUM_DRAFTED = 32, 8


def plain(http: httpx.Client, **params: float) -> tuple[list[int], list[int], list[float]]:
    """Tokens of the prompt, sampled tokens, their log-probabilities."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "logprobs": 0}
    answer = http.post(f"{OAI}/completions", json=body | {"return_token_ids": True} | params)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"]["token_logprobs"]


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 5}]
)
def test_rounds_of_drafts_are_the_plain_sample_bit_for_bit(
    server: Server, params: dict[str, float]
) -> None:
    """Every other draft is wrong in its fourth token; prompts reuse what rounds before computed."""
    with server.http() as http:
        prompt, sampled, logprobs = plain(http, **params)
        tokens: list[int] = []
        found: list[float] = []
        rounds = cached = 0
        while len(tokens) < len(sampled):
            drafted = sampled[len(tokens) : len(tokens) + NUM_DRAFTED]
            if rounds % 2 and len(drafted) > 3:
                drafted[3] += 1
            body = {"model": MODEL, "prompt": prompt + tokens, "drafted": drafted} | params
            verdict = http.post(f"{OAI}/verify", json=body).json()
            tokens += verdict["tokens"]
            found += verdict["logprobs"]
            cached += verdict["usage"]["prompt_tokens_details"]["cached_tokens"]
            rounds += 1
    assert tokens[: len(sampled)] == sampled
    assert found[: len(sampled)] == logprobs
    assert rounds < NUM_TOKENS / 4
    assert cached > 0
