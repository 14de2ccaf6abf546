"""Drafts that come with a request: verified in the prompt's last pass, equal to plain sampling."""

from collections.abc import Sequence

import numpy as np
import pytest

from tests.embedded.tiny import Sampler, ask, random_prompt
from tinkercloud.core.types import SampledSequence, SampleRequest
from tinkercloud.embedded.process.model_store import ModelStore

LENGTH = 12


def only(sampler: Sampler, version: str, request: SampleRequest) -> SampledSequence:
    return sampler.one(version, request).sequences[0]


def verified(
    sampler: Sampler, version: str, prompt: list[int], drafted: Sequence[int], **params: object
) -> SampledSequence:
    drafts = tuple(map(int, drafted))
    request = ask(prompt, max_tokens=len(drafts) + 1, drafted=drafts, use_eos=False, **params)
    return only(sampler, version, request)


def assert_begins(verdict: SampledSequence, plain: SampledSequence, length: int) -> None:
    """It is the first `length` tokens of the plain sample, to the last bit."""
    assert verdict.tokens.tolist() == plain.tokens[:length].tolist()
    assert np.array_equal(verdict.logprobs, plain.logprobs[:length])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("prompt_length", [1, 15, 16, 40, 600])
def test_verdicts_are_beginnings_of_the_plain_sample(
    store: ModelStore, base: str, temperature: float, prompt_length: int
) -> None:
    """Whichever token of the draft is wrong, and where none is."""
    prompt = random_prompt(prompt_length, 3)
    params = {"temperature": temperature, "top_p": 0.95, "seed": 11}
    request = ask(prompt, max_tokens=LENGTH, use_eos=False, **params)
    plain = only(Sampler(store), base, request)
    for num_right in (0, 1, 5, LENGTH - 1):
        drafted = plain.tokens[: LENGTH - 1].copy()
        if num_right < len(drafted):
            drafted[num_right] = (drafted[num_right] + 1) % 256
        assert_begins(
            verified(Sampler(store), base, prompt, drafted, **params), plain, num_right + 1
        )


def test_a_draft_takes_one_step_and_leaves_no_block(store: ModelStore, base: str) -> None:
    sampler, prompt = Sampler(store), random_prompt(20, 5)
    plain = only(sampler, base, ask(prompt, max_tokens=LENGTH, use_eos=False, seed=2))
    replies: list[object] = []
    drafted = tuple(plain.tokens[: LENGTH - 1].tolist())
    request = ask(prompt, max_tokens=LENGTH, use_eos=False, seed=2, drafted=drafted)
    sampler.engine.submit(store.version(base), request, replies.append)
    sampler.engine.step()
    assert len(replies) == 1
    assert not sampler.engine.busy
    assert sampler.engine.num_kv_blocks_held == 0


def test_rounds_of_drafts_are_the_plain_sample(store: ModelStore, base: str) -> None:
    """Each prompt is the last one and its verdict; others sample beside it, and blocks are few."""
    prompt, sampler = random_prompt(33, 8), Sampler(store)
    request = ask(prompt, max_tokens=40, use_eos=False, seed=6)
    plain = only(sampler, base, request)
    rng = np.random.default_rng(0)
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < 40:
        drafted = plain.tokens[len(tokens) : len(tokens) + 7].copy()
        wrong = rng.random(len(drafted)) < 0.2
        drafted[wrong] = (drafted[wrong] + 1) % 256
        drafts = tuple(drafted.tolist())
        asked = ask(
            prompt + tokens, max_tokens=len(drafts) + 1, use_eos=False, seed=6, drafted=drafts
        )
        others = {f"other {i}": (base, ask(random_prompt(9, i), max_tokens=9)) for i in range(3)}
        verdict = sampler.run({"mine": (base, asked)} | others)["mine"].sequences[0]
        tokens += verdict.tokens.tolist()
        logprobs += verdict.logprobs.tolist()
    assert tokens[:40] == plain.tokens.tolist()
    assert logprobs[:40] == plain.logprobs.tolist()


def test_a_draft_that_cannot_be_verified_at_once_has_the_same_verdict(
    store: ModelStore, base: str
) -> None:
    """Penalties follow from every token before, so the sample is decoded, and ends where it leaves
    the draft."""
    prompt, params = random_prompt(20, 5), {"seed": 2, "presence_penalty": 1.5}
    plain = only(Sampler(store), base, ask(prompt, max_tokens=LENGTH, use_eos=False, **params))
    drafted = plain.tokens[: LENGTH - 1].copy()
    drafted[4] = (drafted[4] + 1) % 256
    assert_begins(verified(Sampler(store), base, prompt, drafted, **params), plain, 5)


def test_a_draft_beyond_the_context_is_cut(store: ModelStore, base: str) -> None:
    limit = store.version(base).base.config.max_position_embeddings
    prompt = random_prompt(limit - 3, 4)
    plain = only(Sampler(store), base, ask(prompt, max_tokens=3, use_eos=False, seed=1))
    drafted = [*plain.tokens.tolist(), 1, 2, 3]
    assert_begins(verified(Sampler(store), base, prompt, drafted, seed=1), plain, 3)


def test_a_stop_token_in_the_draft_ends_it(store: ModelStore, base: str) -> None:
    prompt = random_prompt(20, 5)
    plain = only(Sampler(store), base, ask(prompt, max_tokens=LENGTH, use_eos=False, seed=2))
    stop = int(plain.tokens[6])
    first = plain.tokens.tolist().index(stop)
    verdict = verified(
        *(Sampler(store), base, prompt, plain.tokens[: LENGTH - 1]),
        seed=2,
        stop_token_ids=(stop,),
    )
    assert_begins(verdict, plain, first + 1)
    assert verdict.stop_reason == "stop"
