"""A token's log-probability is the same bits when it is sampled and when it is scored."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.embedded.speculative_engine import Drafting, Requests, named
from tests.embedded.tiny import Sampler, ask, random_prompt, tuned, write_tiny_family
from tinkercloud.core.types import FromBase, SampleOutput, SampleRequest
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.sampling import scheduler

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")
K = 5
PROMPT = random_prompt(70, 0)


@pytest.fixture(scope="module", params=["Llama", "Gemma2", "Olmo2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return write_tiny_family(folder, request.param)


@pytest.fixture
def versions(store: ModelStore) -> list[str]:
    """The base, an adapter, another of other rank, and weights of its own."""
    tunings = [tuned(store, f"rank {rank}", rank) for rank in (4, 9, 0)]
    return [store.publish(FromBase("tiny")), *tunings]


def mixture(versions: list[str], temperature: float = 1.0) -> Requests:
    """Prompts that share a beginning and others, of each version; a few at other temperatures."""
    requests: dict[str, tuple[str, SampleRequest]] = {}
    for i, version in enumerate(versions * 3):
        shared = PROMPT[: 20 + 16 * (i % 4)] if i % 2 else []
        request = ask(
            shared + random_prompt(5 + 4 * i, i), n=1 + i % 3, max_tokens=40 - i, seed=i,
            temperature=temperature, use_eos=False, topk_sample_logprobs=K,
        )  # fmt: skip
        requests[str(i)] = (version, request)
    return requests


def scoring(requests: Requests, outputs: Mapping[str, SampleOutput]) -> Requests:
    """Each sample with its prompt, as a prompt to be scored in three ways; every other one without
    the likeliest tokens, which need logits."""
    scored: dict[str, tuple[str, SampleRequest]] = {}
    for name, (version, request) in requests.items():
        for i, sequence in enumerate(outputs[name].sequences):
            text = [*request.prompt.tolist(), *sequence.tokens.tolist()]
            targets = np.array(text[1:], np.int64)[:, None].repeat(2, axis=1)
            scored[f"{name} {i}"] = (
                version,
                ask(text, max_tokens=1, prompt_logprobs=True,
                    topk_prompt_logprobs=K if len(scored) % 2 else 0,
                    target_prompt_logprobs=targets),
            )  # fmt: skip
    return scored


def assert_equal(
    requests: Requests, outputs: Mapping[str, SampleOutput], scores: Mapping[str, SampleOutput]
) -> None:
    for name, (_, request) in requests.items():
        first = len(request.prompt)
        for i, sequence in enumerate(outputs[name].sequences):
            score = scores[f"{name} {i}"]
            assert score.prompt_logprobs is not None
            assert np.array_equal(sequence.logprobs, score.prompt_logprobs[first:])
            for targets in score.target_prompt_logprobs[first - 1 :].T:
                assert np.array_equal(sequence.logprobs, targets)
            for part in ("token_ids", "logprobs") if score.topk_prompt_logprobs else ():
                sampled = getattr(sequence.topk, part)
                assert np.array_equal(sampled, getattr(score.topk_prompt_logprobs, part)[first:])


@pytest.mark.parametrize("drafter", ["off", "suffix", "random"])
def test_sampled_in_a_crowd_and_scored_alone_or_in_another(
    store: ModelStore, versions: list[str], drafter: str
) -> None:
    requests = mixture(versions)
    drafting = Drafting(named(drafter), 4)
    outputs = Sampler(store, num_threads=2, speculate=drafting).run(requests)
    scored = scoring(requests, outputs)
    assert_equal(requests, outputs, Sampler(store, num_threads=3).run(scored))
    alone = {name: Sampler(store).one(*request) for name, request in scored.items()}
    assert_equal(requests, outputs, alone)


def test_prompts_in_pieces_and_samples_that_lost_their_blocks(
    store: ModelStore, versions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = ask(PROMPT, n=3, max_tokens=400, use_eos=False, topk_sample_logprobs=K)
    requests = {"long": (versions[1], long), **mixture(versions)}
    alone = {name: Sampler(store).one(*request) for name, request in requests.items()}
    monkeypatch.setattr(scheduler, "CHUNK", 7)
    monkeypatch.setattr(scheduler, "SCORED_CHUNK", 7)
    sampler = Sampler(store, kv_cache_bytes=0)  # blocks for 1,040 tokens
    scores = sampler.run({**requests, **scoring(requests, alone)})
    assert sampler.engine.num_preempted > 0
    assert_equal(requests, alone, scores)
    assert_equal(requests, scores, scores)


def test_the_raw_logprobs_of_what_is_sampled_greedily(
    store: ModelStore, versions: list[str]
) -> None:
    requests = mixture(versions, temperature=0.0)
    outputs = Sampler(store).run(requests)
    assert_equal(requests, outputs, Sampler(store).run(scoring(requests, outputs)))


def test_scoring_a_prompt_changes_no_sample(store: ModelStore, versions: list[str]) -> None:
    request = ask(PROMPT, n=2, max_tokens=20, seed=3, use_eos=False)
    scored = ask(PROMPT, n=2, max_tokens=20, seed=3, use_eos=False, prompt_logprobs=True)
    for version in versions:
        sampler = Sampler(store)
        outputs = sampler.run({"plain": (version, request), "scored": (version, scored)})
        alone = Sampler(store).one(version, scored)
        for output in (outputs["scored"], alone):
            for one, other in zip(outputs["plain"].sequences, output.sequences, strict=True):
                assert np.array_equal(one.tokens, other.tokens)
                assert np.array_equal(one.logprobs, other.logprobs)
        (state,) = sampler.engine.states
        assert state.cache.pool.num_available == state.cache.pool.num_blocks
