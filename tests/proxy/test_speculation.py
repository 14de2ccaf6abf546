"""Samples through rounds of drafts against the target's own, on scripted servers of each kind."""

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.proxy.scripted_server import BLOCK, END, ScriptedModel, ScriptedServer, keyed_draw
from tinkercloud.chat.requests import SamplingOptions
from tinkercloud.errors import UpstreamRefused
from tinkercloud.proxy.drafters import DraftPool, TokenDrafter
from tinkercloud.proxy.server_kinds import SERVER_KINDS, ScoreForm
from tinkercloud.proxy.speculation import SampleTask, Speculator
from tinkercloud.proxy.target import TRIES, Target
from tinkercloud.proxy.verification import RoundRequest, Scores, Verified, verify_by_chance

GREEDY = SamplingOptions(temperature=0.0)
PROMPT, NUM_TOKENS = (3, 1), 60


def speculator(
    target: ScriptedServer,
    *drafts: ScriptedServer,
    most: int = 8,
    clock: Callable[[], float] | None = None,
) -> Speculator:
    """clock: by default one that stands still, so that no round depends on this machine's speed."""
    kind = SERVER_KINDS[target.kind]
    sources = [TokenDrafter(each.upstream(), SERVER_KINDS[each.kind]) for each in drafts]
    asked = Target(target.upstream(), kind, lambda token: token != END)
    return Speculator(asked, DraftPool(sources, "race", 1.0), most, clock or (lambda: 0.0))


async def sampled(
    proxy: Speculator, sampling: SamplingOptions = GREEDY, num: int = NUM_TOKENS
) -> list[int]:
    task = SampleTask(PROMPT, num, sampling)
    return [token async for piece in proxy.pieces(task) for token in piece.tokens]


@pytest.mark.parametrize("kind", SERVER_KINDS)
@pytest.mark.parametrize("agreement", [0.0, 0.6, 1.0])
async def test_greedy_tokens_are_the_target_s_own(kind: str, agreement: float) -> None:
    model = ScriptedModel()
    target = ScriptedServer(kind, model)
    draft = ScriptedServer("vllm", ScriptedModel(leader=model, agreement=agreement))
    proxy = speculator(target, draft)
    assert await sampled(proxy) == model.alone(PROMPT, NUM_TOKENS)
    if agreement == 1.0:
        assert proxy.counts.accepted == proxy.counts.drafted
        assert len(target.requests) < NUM_TOKENS / 4
    assert proxy.counts.verified + proxy.counts.plain == NUM_TOKENS


@pytest.mark.parametrize("kind", SERVER_KINDS)
@pytest.mark.parametrize("end_at", [2, 3, 9, 17])
async def test_a_sample_ends_where_the_target_ends_it(kind: str, end_at: int) -> None:
    """Also where the draft ends, and where it goes on."""
    model = ScriptedModel(end_at=end_at)
    for drafting in (model, ScriptedModel(leader=ScriptedModel(), agreement=1.0)):
        proxy = speculator(ScriptedServer(kind, model), ScriptedServer("vllm", drafting))
        tokens = await sampled(proxy)
        assert tokens == model.alone(PROMPT, NUM_TOKENS)
        assert tokens.count(END) == 1


@pytest.mark.parametrize("kind", ["vllm", "vllm-cached", "sglang"])
async def test_at_a_tie_the_target_samples_itself(kind: str) -> None:
    model = ScriptedModel(tied=frozenset(range(4, 30)))
    target, draft = ScriptedServer(kind, model), ScriptedServer("vllm", model)
    assert await sampled(speculator(target, draft)) == model.alone(PROMPT, NUM_TOKENS)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_seeded_samples_are_the_seeded_samples_of_our_server(temperature: float) -> None:
    """Drafts of the same seed share the target's noise."""
    model = ScriptedModel()
    target = ScriptedServer("tinkercloud", model)
    draft = ScriptedServer("tinkercloud", ScriptedModel(leader=model, agreement=0.9))
    proxy = speculator(target, draft)
    for seed in range(5):
        alone = model.sample(PROMPT, NUM_TOKENS, keyed_draw(seed, temperature))
        assert await sampled(proxy, SamplingOptions(temperature=temperature, seed=seed)) == alone
    assert proxy.counts.accepted > proxy.counts.drafted / 2


@pytest.mark.parametrize("chokes", [False, True])
async def test_what_a_cache_has_of_a_draft_is_not_read_of_it(chokes: bool) -> None:
    """The same sample a second time: the whole answer is in the cache, without scores. A server
    that fails over these samples its token itself, and never computes the whole prompt for it."""
    model = ScriptedModel()
    target = ScriptedServer("vllm-cached", model, chokes=chokes)
    proxy = speculator(target, ScriptedServer("vllm", model))
    for _ in range(2):
        target.requests.clear()
        assert await sampled(proxy) == model.alone(PROMPT, NUM_TOKENS)
    assert not [body for _, body in target.requests if "prompt_logprobs" in body]
    assert proxy.target.block == (0 if chokes else BLOCK)
    assert len(target.requests) < (TRIES + 1) * NUM_TOKENS if chokes else NUM_TOKENS / 2
    # Of the other one a token, before its blocks are known.
    assert proxy.counts.plain > NUM_TOKENS / 2 if chokes else proxy.counts.plain <= 1


async def test_what_a_verification_computes_is_known_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind any number of tokens: no block is cached that the last one would end."""
    model, computed, told = ScriptedModel(), list[int](), list[int]()
    target = ScriptedServer("vllm-cached", model)
    draft = ScriptedServer("vllm", ScriptedModel(leader=model, agreement=0.7))
    proxy = speculator(target, draft)
    scores, was_verified = proxy.target.scores, proxy.costs.was_verified

    async def scored(form: ScoreForm, request: RoundRequest) -> Scores:
        result = await scores(form, request)
        computed.append(len(request.tokens) - result.num_cached)
        return result

    def verified(rows: int, seconds: float, *, closes_stream: bool, num_requests: int) -> None:
        told.append(rows)
        was_verified(rows, seconds, closes_stream=closes_stream, num_requests=num_requests)

    await proxy.measure((3, 5, 1, 4))
    assert proxy.target.block == BLOCK
    monkeypatch.setattr(proxy.target, "scores", scored)
    monkeypatch.setattr(type(proxy.costs), "was_verified", staticmethod(verified))
    await sampled(proxy, num=10 * NUM_TOKENS)
    assert len(told) > 50 and told == computed


async def test_a_draft_that_fails_leaves_the_target_s_tokens() -> None:
    model = ScriptedModel()
    target, draft = ScriptedServer("vllm", model), ScriptedServer("vllm", model)
    proxy = speculator(target, draft)
    task, tokens = SampleTask(PROMPT, NUM_TOKENS, GREEDY), []
    async for piece in proxy.pieces(task):
        tokens += piece.tokens
        draft.failing = len(tokens) > 10
    assert tokens == model.alone(PROMPT, NUM_TOKENS)
    assert proxy.counts.plain > 0 < proxy.counts.accepted
    assert proxy.drafters.entries[0].num_failed == 1


async def test_a_target_that_fails_is_an_error() -> None:
    model = ScriptedModel()
    target = ScriptedServer("vllm", model, failing=True)
    with pytest.raises(UpstreamRefused, match="500"):
        await sampled(speculator(target, ScriptedServer("vllm", model)))


def chi_square(observed: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """In standard deviations of the statistic from its mean."""
    num = sum(observed.values())
    terms = [(observed[key] - num * p) ** 2 / (num * p) for key, p in expected.items()]
    freedom = len(expected) - 1
    return (sum(terms) - freedom) / (2 * freedom) ** 0.5


async def deviation(kind: str) -> float:
    """Of texts of three tokens; the draft is what another model takes for the likeliest."""
    model = ScriptedModel(num_tokens=4)
    draft = ScriptedServer("vllm", ScriptedModel(num_tokens=4, leader=model, agreement=0.5))
    proxy = speculator(ScriptedServer(kind, model), draft)
    seeds = random.Random(3)
    observed: Counter[tuple[int, ...]] = Counter()
    for _ in range(1500):
        sampling = SamplingOptions(temperature=1.0, seed=seeds.getrandbits(30))
        observed[tuple(await sampled(proxy, sampling, 3))] += 1
    assert 0.1 < proxy.counts.accepted / proxy.counts.drafted < 0.9
    others = [token for token in range(4) if token != END]
    texts = [(a, b, c) for a in others for b in others for c in others]
    expected = {
        text: math.exp(sum(model.logprobs((*PROMPT, *text[:i]))[text[i]] for i in range(3)))
        for text in texts
    }
    return chi_square(observed, expected)


@pytest.mark.parametrize("kind", ["vllm", "vllm-cached", "sglang"])
async def test_drawn_tokens_have_the_target_s_distribution(kind: str) -> None:
    assert abs(await deviation(kind)) < 4


async def test_a_wrong_rule_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rejection any token may come, the rejected one too."""

    def wrong(*arguments: Any) -> Verified:
        return replace(verify_by_chance(*arguments), rejected=None)

    monkeypatch.setattr("tinkercloud.proxy.target.verify_by_chance", wrong)
    assert await deviation("vllm") > 10
