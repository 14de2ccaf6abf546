"""How many tokens rounds draft, by what requests take on a clock that the target moves."""

import math
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.proxy.scripted_server import Json, ScriptedModel, ScriptedServer
from tests.proxy.test_speculation import GREEDY, speculator
from tinkercloud.proxy.round_costs import LARGEST_SURPRISE, LineFit, RoundCosts
from tinkercloud.proxy.round_length import FIRST_DRAFTED, FIRST_PLAIN, MISSES, RoundLength
from tinkercloud.proxy.speculation import SampleTask

NUM_TOKENS, TOKEN_S, ASK_S = 240, 0.012, 0.01
ALONE_S = NUM_TOKENS * TOKEN_S + ASK_S


@dataclass
class TimedServer(ScriptedServer):
    """verify_s: what a verification takes, beside row_s for each of its tokens."""

    verify_s: float = 0.0
    row_s: float = 0.0
    now: float = 0.0

    def answer(self, request: httpx.Request) -> httpx.Response:
        num = len(self.requests)
        response = super().answer(request)
        for path, body in self.requests[num:]:
            self.now += ASK_S + self._work_s(path, body, response.json())
        return response

    def _work_s(self, path: str, body: Json, answer: Any) -> float:
        if path.endswith("/verify"):
            return self.verify_s + self.row_s * (len(body["drafted"]) + 1)
        rows = len(body["prompt"]) if body.get("prompt_logprobs") else 0
        num = len(answer["choices"][0]["token_ids"])
        return TOKEN_S * num + (self.verify_s + self.row_s * rows if rows else 0.0)


async def seconds(target: TimedServer, agreement: float, most: int = 128) -> float:
    """Of a sample, after another one has shown what requests take."""
    draft = ScriptedServer("vllm", ScriptedModel(leader=target.model, agreement=agreement))
    proxy = speculator(target, draft, most=most, clock=lambda: target.now)
    for seed in (3, 5):
        began, tokens, prompt = target.now, list[int](), (seed, 1)
        async for piece in proxy.pieces(SampleTask(prompt, NUM_TOKENS, GREEDY)):
            tokens += piece.tokens
        assert tokens == target.model.alone(prompt, NUM_TOKENS)
    return target.now - began


@pytest.mark.parametrize("agreement", [0.0, 0.3, 0.6])
async def test_where_verifying_takes_long_bad_drafts_cost_little(agreement: float) -> None:
    """As vLLM's does, which reads the whole prompt again."""
    target = TimedServer("vllm", ScriptedModel(), verify_s=0.1, row_s=0.001)
    assert await seconds(target, agreement) < 1.25 * ALONE_S


async def test_where_verifying_takes_long_good_drafts_are_long() -> None:
    target = TimedServer("vllm", ScriptedModel(), verify_s=0.1, row_s=0.001)
    assert await seconds(target, 1.0) < 0.6 * ALONE_S


@pytest.mark.parametrize(("agreement", "times"), [(0.0, 1.25), (0.6, 1.05), (0.9, 0.5), (1.0, 0.2)])
async def test_where_verifying_is_a_pass_drafts_of_any_worth_are_verified(
    agreement: float, times: float
) -> None:
    target = TimedServer("tinkercloud", ScriptedModel(), verify_s=TOKEN_S, row_s=0.0005)
    assert await seconds(target, agreement) < times * ALONE_S


def test_without_known_costs_a_round_follows_the_one_before() -> None:
    length = RoundLength(20, RoundCosts())
    drafted = [length.drafted(100)]
    for accepted in (8, 16, 3):
        length.was_verified(drafted[-1], accepted)
        drafted.append(length.drafted(100))
    assert drafted == [FIRST_DRAFTED, 16, 20, 4]
    assert length.pays(100, 1)


def test_after_some_misses_the_target_samples_more_and_more_alone() -> None:
    length = RoundLength(20, RoundCosts())
    for _ in range(MISSES):
        assert not length.is_plain
        length.was_verified(8, 0)
    assert length.is_plain and length.plain == FIRST_PLAIN
    length.was_plain()
    assert not length.is_plain and length.plain == 2 * FIRST_PLAIN
    length.was_verified(8, 0)
    assert length.is_plain
    length.was_plain()
    length.was_verified(8, 5)
    assert not length.is_plain and length.plain == FIRST_PLAIN


def test_a_line_is_found_and_followed() -> None:
    fit = LineFit()
    assert math.isnan(fit.at(4))
    fit.add(10, 0.5)
    assert fit.at(5) == pytest.approx(0.5) and fit.at(20) == pytest.approx(1.0)
    for x in (20, 30, 40):
        fit.add(x, 0.1 + 0.04 * x)
    assert fit.at(100) == pytest.approx(4.1, rel=0.01)
    for x in (10, 20, 30, 40) * 40:
        fit.add(x, 0.2 + 0.01 * x)
    assert fit.at(100) == pytest.approx(1.2, rel=0.01)


def test_a_request_that_was_held_up_counts_for_little() -> None:
    fit = LineFit()
    for _ in range(20):
        fit.add(10, 0.1)
    fit.add(10, 60.0)
    assert fit.at(10) < 0.1 * (1 + LARGEST_SURPRISE / 10)
