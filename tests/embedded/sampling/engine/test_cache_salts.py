"""What is kept of prompts and samples is reused only by requests with the same cache salt."""

from functools import partial

import pytest

from tests.embedded.speculative_engine import Drafting, Requests, all_same, mixture, named
from tests.embedded.tiny import Sampler, ask, random_prompt, same
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.process.model_store import ModelStore

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")
PROMPT = random_prompt(100, 0)


def test_a_stranger_computes_a_known_prompt_and_gets_the_same_bits(
    store: ModelStore, base: str
) -> None:
    sampler = Sampler(store)
    ask_as = partial(ask, PROMPT, n=2, max_tokens=30, seed=4, use_eos=False)
    first = sampler.one(base, ask_as(cache_salt="ann"))
    stranger = sampler.one(base, ask_as(cache_salt="bob"))
    again = sampler.one(base, ask_as(cache_salt="ann"))
    hits = [output.prompt_cache_hit_tokens for output in (first, stranger, again)]
    assert hits == [0, 0, 99]
    same(first, stranger)
    same(first, again)


def test_of_prompts_that_arrive_together_each_salt_computes_its_own(
    store: ModelStore, base: str
) -> None:
    requests = {
        f"{salt}{i}": (base, ask([*PROMPT, i], max_tokens=4, use_eos=False, cache_salt=salt))
        for salt in ("ann", "bob")
        for i in range(2)
    }
    together = Sampler(store).run(requests)
    for salt in ("ann", "bob"):
        hits = [together[f"{salt}{i}"].prompt_cache_hit_tokens for i in range(2)]
        assert sorted(hits) == [0, 96], salt


def accepted(drafting: Drafting, first: int) -> int:
    """Drafted tokens that were right, in the rounds from the `first` on."""
    return sum(sum(each.accepted) for each in drafting.policy.rounds[first:])


def test_text_of_another_salt_is_not_drafted_from(store: ModelStore, base: str) -> None:
    """The suffix drafter over greedy samples: one's own text stands, a stranger's does not."""

    def asked(salt: str) -> Requests:
        return mixture(base, 3, 0.0, use_eos=False, cache_salt=salt)

    plain = Sampler(store).run(asked(""))
    drafting = Drafting(named("suffix"), 6)
    sampler = Sampler(store, speculate=drafting)
    right: list[int] = []
    for salt in ("ann", "bob", "ann"):
        first = len(drafting.policy.rounds)
        all_same(sampler.run(asked(salt)), plain)
        right.append(accepted(drafting, first))
    assert right[2] > 10 * max(right[:2])
