"""Which drafts are verified, by what requests take on a clock that the target moves."""

import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import httpx
import pytest

from tests.proxy.scripted_server import END, Json, ScriptedModel, ScriptedServer
from tests.proxy.test_speculation import GREEDY, PROMPT, chi_square, sampled, speculator
from tinkercloud.chat.requests import SamplingOptions
from tinkercloud.proxy.draft_length import (
    FIRST_ASKED,
    AcceptanceRate,
    DraftLengthController,
)
from tinkercloud.proxy.round_costs import LARGEST_SURPRISE, LineFit, RoundCosts
from tinkercloud.proxy.server_kinds import SERVER_KINDS
from tinkercloud.proxy.speculation import SampleTask
from tinkercloud.speculative.drafters.drafter import Draft

NUM_TOKENS, TOKEN_S, ASK_S = 240, 0.012, 0.01
ALONE_S = NUM_TOKENS * TOKEN_S + ASK_S


@dataclass
class TimedServer(ScriptedServer):
    """verify_s: what a verification takes, beside row_s for each of its tokens. open_s: until the
    first token of a stream. now: moves with what is read of it."""

    verify_s: float = 0.0
    row_s: float = 0.0
    open_s: float = 0.0
    now: float = 0.0
    num_streamed: int = 0

    def answer(self, request: httpx.Request) -> httpx.Response:
        num = len(self.requests)
        response = super().answer(request)
        for path, body in self.requests[num:]:
            self.now += ASK_S + self._work_s(path, body)
        return response

    async def streamed(self, events: Sequence[Json]) -> AsyncIterator[bytes]:
        async for event in super().streamed(events):
            if b'"token_ids"' in event:
                self.now += TOKEN_S
                self.num_streamed += 1
            yield event

    def _work_s(self, path: str, body: Json) -> float:
        if path.endswith("/verify"):
            return self.verify_s + self.row_s * (len(body["drafted"]) + 1)
        if body.get("prompt_logprobs"):
            return self.verify_s + self.row_s * (len(body["prompt"]) + 1)
        return self.open_s if body.get("stream") else TOKEN_S * body["max_tokens"]


async def seconds(target: TimedServer, agreement: float, most: int = 128) -> tuple[float, int]:
    """Of a sample whose drafts take no time, and how many of its drafts were verified."""
    draft = ScriptedServer("vllm", ScriptedModel(leader=target.model, agreement=agreement))
    proxy = speculator(target, draft, most=most, clock=lambda: target.now)
    await proxy.measure((3, 5, 1, 4))
    began, tokens, prompt = target.now, list[int](), (5, 1)
    async for piece in proxy.pieces(SampleTask(prompt, NUM_TOKENS, GREEDY)):
        tokens += piece.tokens
    assert tokens == target.model.alone(prompt, NUM_TOKENS)
    return target.now - began, proxy.counts.rounds


def slow_to_verify(model: ScriptedModel | None = None) -> TimedServer:
    """As vLLM, which reads the whole prompt again, and some of it once more for the next stream."""
    return TimedServer("vllm", model or ScriptedModel(), verify_s=0.06, row_s=0.0007, open_s=0.05)


@pytest.mark.parametrize("agreement", [0.0, 0.3, 0.6, 0.8])
async def test_where_verifying_takes_long_bad_drafts_cost_little(agreement: float) -> None:
    target = slow_to_verify()
    duration, num_rounds = await seconds(target, agreement)
    assert num_rounds <= 10 * agreement**4
    assert duration < 1.03 * (ALONE_S + target.open_s)


async def test_where_verifying_takes_long_drafts_that_go_on_being_right_are_verified() -> None:
    """After a row of right ones, long, and out of a stream that is closed for it."""
    duration, num_rounds = await seconds(slow_to_verify(), 1.0)
    assert 1 <= num_rounds <= 8
    assert duration < 0.7 * ALONE_S


@pytest.mark.parametrize(("agreement", "times"), [(0.0, 1.1), (0.6, 1.05), (0.9, 0.6), (1.0, 0.25)])
async def test_where_verifying_is_a_pass_drafts_of_any_worth_are_verified(
    agreement: float, times: float
) -> None:
    target = TimedServer("tinkercloud", ScriptedModel(), verify_s=TOKEN_S, row_s=0.0005)
    duration, num_rounds = await seconds(target, agreement)
    assert duration < times * ALONE_S
    assert agreement < 0.9 or num_rounds > 2


async def test_a_stream_that_is_left_is_read_no_further() -> None:
    target = slow_to_verify()
    draft = ScriptedServer("vllm", target.model)
    proxy = speculator(target, draft, most=64, clock=lambda: target.now)
    await proxy.measure((3, 5, 1, 4))
    before = target.num_streamed
    await sampled(proxy, num=NUM_TOKENS)
    assert proxy.counts.rounds > 0
    assert target.num_streamed - before == proxy.counts.plain
    assert proxy.counts.plain + proxy.counts.verified == NUM_TOKENS


class Whimsical(DraftLengthController):
    """Decides by chance."""

    coins = random.Random(0)

    def verified(self, num_prompt: int, num_drafted: int, *, is_streaming: bool) -> int:
        return self.coins.choice([0, self.coins.randint(0, num_drafted)])

    def asked(self, num_prompt: int, left: int, *, is_streaming: bool) -> int:
        return self.coins.randint(0, max(0, min(8, left - 1)))


@pytest.mark.parametrize("kind", SERVER_KINDS)
async def test_tokens_are_the_target_s_own_whatever_is_decided(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, with ends and ties; of our server the seed's too."""
    monkeypatch.setattr("tinkercloud.proxy.speculation.DraftLengthController", Whimsical)
    for number in range(12):
        Whimsical.coins = coins = random.Random(number)
        ties = frozenset(coins.sample(range(3, 60), 5))
        model = ScriptedModel(end_at=coins.randint(3, 90), tied=ties)
        leader = ScriptedModel(leader=model, agreement=coins.random())
        server = ScriptedServer(kind, model)
        proxy = speculator(server, ScriptedServer("vllm", leader))
        tokens = await sampled(proxy)
        assert tokens == model.alone(PROMPT, 60), number
        assert proxy.counts.plain + proxy.counts.verified == len(tokens)
        if kind == "tinkercloud":
            drawn = SamplingOptions(temperature=0.8, seed=number)
            alone = server.drawn(list(PROMPT), 60, {"temperature": 0.8}, number)
            assert await sampled(proxy, drawn) == alone


@pytest.mark.parametrize("kind", ["vllm", "vllm-cached", "sglang"])
async def test_drawn_tokens_have_the_target_s_distribution_whatever_is_decided(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams are left after any token, by what they said."""

    class Selective(Whimsical):
        """Leaves a stream after one token rather than after others, with a draft of any length."""

        def verified(self, num_prompt: int, num_drafted: int, *, is_streaming: bool) -> int:
            return num_drafted if not is_streaming or self.rate.num_right else 0

    monkeypatch.setattr("tinkercloud.proxy.speculation.DraftLengthController", Selective)
    model = ScriptedModel(num_tokens=4)
    leader = ScriptedModel(num_tokens=4, leader=model, agreement=0.5)
    proxy = speculator(ScriptedServer(kind, model), ScriptedServer("vllm", leader))
    seeds, observed = random.Random(3), Counter[tuple[int, ...]]()
    for _ in range(400):
        sampling = SamplingOptions(temperature=1.0, seed=seeds.getrandbits(30))
        observed[tuple(await sampled(proxy, sampling, 3))] += 1
    others = [token for token in range(4) if token != END]
    texts = [(a, b, c) for a in others for b in others for c in others]
    expected = {
        text: math.exp(sum(model.logprobs((*PROMPT, *text[:i]))[text[i]] for i in range(3)))
        for text in texts
    }
    assert proxy.counts.rounds > 100 < proxy.counts.plain
    assert abs(chi_square(observed, expected)) < 4


# ---- the controller


def known_costs(token_s: float = 0.1, verify_s: float = 0.1, open_s: float = 0.0) -> RoundCosts:
    costs = RoundCosts()
    costs.token.add(10, 10 * token_s)
    for rows in (10, 50):
        costs.verified.add(rows, verify_s)
        costs.opened.add(rows, open_s)
    return costs


def controller(costs: RoundCosts, num_right: int = 0) -> DraftLengthController:
    length = DraftLengthController(64, costs, lambda _, num: num + 1, lambda num: num)
    length.was_verified(num_right, num_right)
    return length


def test_a_draft_is_verified_where_its_tokens_take_longer_than_its_round() -> None:
    for verify_s, open_s, is_streaming, num in (
        (0.1, 0.0, True, 10),
        (2.0, 0.0, True, 0),
        (0.5, 0.0, True, 10),
        (0.5, 1.0, True, 0),
        (0.5, 1.0, False, 10),
    ):
        length = controller(known_costs(0.1, verify_s, open_s), num_right=20)
        assert length.verified(100, 10, is_streaming=is_streaming) == num, (verify_s, open_s)


def test_tokens_that_are_hardly_right_are_left_out_of_a_round() -> None:
    costs = RoundCosts()
    costs.token.add(10, 1.0)
    for rows in (10, 50):
        costs.verified.add(rows, 0.05 + 0.01 * rows)
    length = controller(costs)
    for _ in range(20):
        length.was_verified(2, 1)
    assert 1 <= length.verified(100, 40, is_streaming=False) < 8


def test_a_draft_that_would_save_little_is_verified_again_after_a_long_time() -> None:
    costs = known_costs(verify_s=0.4)
    length = controller(costs, num_right=3)
    assert length.verified(100, 3, is_streaming=True) == 0
    costs.was_streamed(1000, 100.0)
    assert length.verified(100, 3, is_streaming=True) == 3
    costs.was_verified(20, 0.4, closes_stream=False)
    assert length.verified(100, 3, is_streaming=True) == 0


def test_what_closing_a_stream_takes_is_not_taken_for_a_verification_s_time() -> None:
    """So that a draft behind verified ones is not left out for it."""
    costs = known_costs()
    length = controller(costs, num_right=1)
    for _ in range(3):
        costs.was_verified(4, 0.4, closes_stream=True)
    assert costs.verified.at(4) == pytest.approx(0.1)
    assert length.verified(100, 3, is_streaming=True) == 0
    assert length.verified(100, 3, is_streaming=False) == 3


@dataclass
class WarmingServer(TimedServer):
    """Its first requests take five times as long."""

    num_slow: int = 6

    def _work_s(self, path: str, body: Json) -> float:
        return super()._work_s(path, body) * (5 if len(self.requests) <= self.num_slow else 1)


async def test_a_server_that_has_just_begun_is_not_taken_to_be_slow() -> None:
    costs = []
    for num_slow in (0, 6):
        target = WarmingServer(
            "vllm", ScriptedModel(), verify_s=0.06, row_s=0.001, open_s=0.05, num_slow=num_slow
        )
        draft = ScriptedServer("vllm", ScriptedModel(leader=target.model))
        proxy = speculator(target, draft, most=16, clock=lambda target=target: target.now)
        await proxy.measure((3, 5, 1, 4))
        costs.append([proxy.costs.verified.at(100), proxy.costs.opened.at(100)])
    assert costs[1] == pytest.approx(costs[0], rel=0.01)


async def test_a_draft_for_which_a_stream_is_closed_is_not_asked_for_again() -> None:
    target = TimedServer("tinkercloud", ScriptedModel(), verify_s=3 * TOKEN_S, row_s=0.0005)
    draft = ScriptedServer("vllm", ScriptedModel(leader=target.model, agreement=0.9))
    proxy = speculator(target, draft, most=16, clock=lambda: target.now)
    await proxy.measure((3, 5, 1, 4))
    await sampled(proxy, num=NUM_TOKENS)
    asked = [tuple(body["prompt"]) for _, body in draft.requests]
    assert proxy.counts.rounds > 2 < proxy.counts.plain
    assert len(asked) == len(set(asked))


def test_a_drafter_s_confidence_says_which_tokens_fail() -> None:
    """Every fourth token is a digit that nobody foresees; the drafter is sure of the others."""
    rate, confidences = AcceptanceRate(), (0.95, 0.95, 0.95, 0.5)
    for number in range(80):
        place = number % 4
        rate.add(is_right=place < 3, confidence=confidences[place])
    assert rate.num_right == 0
    expected = rate.accepted(4, confidences)
    assert expected[2] > 2.7
    assert expected[3] - expected[2] < 0.15
    assert rate.at(0, 0.5) < 0.55 < 0.95 < rate.at(0, 0.95)  # in a place where it was never seen
    assert rate.accepted(4)[2] < 2.5  # of a drafter that has none, by the row alone


def test_a_slow_drafter_that_is_never_right_is_asked_less_and_less() -> None:
    costs = known_costs()
    for num in (1, 64):
        costs.drafted.add(num, 0.5)
    length, gaps, since = controller(costs), list[int](), 0
    for _ in range(300):
        if length.asked(100, 200, is_streaming=True):
            gaps.append(since)
            since = 0
            length.was_drafted(Draft((1,)))
        length.was_sampled((2,))
        since += 1
    assert gaps[0] <= FIRST_ASKED and gaps[-1] == 64 and gaps == sorted(gaps)


def test_rates_are_of_the_length_of_the_row() -> None:
    """Rows that fail at sixteen again and again are not expected to be longer."""
    rate = AcceptanceRate()
    assert rate.accepted(3) == pytest.approx([1 / 3, 1 / 3 + 1 / 6, 1 / 3 + 1 / 6 + 1 / 10])
    for _ in range(20):
        for _ in range(16):
            rate.add(is_right=True)
        assert rate.num_right == 16
        rate.add(is_right=False)
    assert rate.at(4) > 0.95 > 0.2 > rate.at(16)
    for _ in range(8):
        rate.add(is_right=True)
    assert 7 < rate.accepted(100)[-1] < 9


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
