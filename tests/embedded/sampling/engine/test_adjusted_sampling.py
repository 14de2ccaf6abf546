"""min-p and penalties through the whole engine."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.embedded.speculative_engine import Drafting, all_same, knowing
from tests.embedded.tiny import VOCAB, Sampler, ask, random_prompt, reference, same
from tinkercloud.core.types import SampleRequest
from tinkercloud.decoding.sampler import gumbel_noise
from tinkercloud.embedded.process.model_store import ModelStore

PROMPT = random_prompt(20, 0)
OPTIONS = {"min_p": 0.02, "presence_penalty": 1.0, "frequency_penalty": 0.5, "use_eos": False}


def penalized(seed: int, **more: object) -> SampleRequest:
    return ask(PROMPT, **({"n": 2, "max_tokens": 30, "seed": seed} | OPTIONS | more))


@pytest.mark.parametrize("dtype", ["float32"], indirect=True)
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_penalties_and_min_p_equal_the_slow_reference(
    store: ModelStore, base: str, folder: Path, temperature: float
) -> None:
    model = reference(folder)
    output = Sampler(store).one(base, penalized(11, temperature=temperature))
    for index, sequence in enumerate(output.sequences):
        tokens = list(PROMPT)
        for token, logprob in zip(sequence.tokens, sequence.logprobs, strict=True):
            with torch.no_grad():
                scores = model(torch.tensor([tokens])).logits[0, -1].double()
            for each, count in Counter(tokens[len(PROMPT) :]).items():
                scores[each] -= 1.0 + 0.5 * count
            probs = torch.softmax(scores / (temperature or 1.0), -1)
            noise = torch.zeros(VOCAB)
            if temperature:
                probs[probs < 0.02 * probs.max()] = 0
                probs /= probs.sum()
                noise = gumbel_noise(11, index, len(tokens), VOCAB)
            assert int(token) == int((probs.log() + noise).argmax())
            assert logprob == pytest.approx(float(probs[token].log()), abs=2e-4)
            tokens.append(int(token))


def test_a_repeating_greedy_sample_repeats_less_under_penalties(
    store: ModelStore, base: str
) -> None:
    plain = ask(PROMPT, max_tokens=200, temperature=0.0, use_eos=False)
    other = ask(PROMPT, max_tokens=200, temperature=0.0, use_eos=False, frequency_penalty=2.0)
    outputs = Sampler(store).run({"plain": (base, plain), "other": (base, other)})
    most = {
        name: max(Counter(output.sequences[0].tokens.tolist()).values())
        for name, output in outputs.items()
    }
    assert most["other"] < most["plain"] / 2


@pytest.mark.parametrize("most", [1, 5])
def test_drafts_change_nothing_and_penalized_samples_get_none(
    store: ModelStore, base: str, most: int
) -> None:
    """Beside samples with drafts, and min-p alone, which takes them."""
    requests = {
        "penalized": (base, penalized(1)),
        "min_p": (base, penalized(2, presence_penalty=0.0, frequency_penalty=0.0)),
        "plain": (base, ask(PROMPT, n=2, max_tokens=30, seed=3, use_eos=False)),
    }
    alone = {name: Sampler(store).one(*request) for name, request in requests.items()}
    drafting = Drafting(lambda _: knowing(alone, requests, 4), most)
    all_same(Sampler(store, speculate=drafting).run(requests), alone)
    assert drafting.policy.num_accepted > 0
    full_round = next(each for each in drafting.policy.rounds if each.num_sequences == 6)
    assert sorted(full_round.limits) == [0, 0, most, most, most, most]


def test_the_samples_of_others_keep_their_bits(store: ModelStore, base: str) -> None:
    plain = ask(PROMPT, n=3, max_tokens=40, seed=5, use_eos=False)
    outputs = Sampler(store).run({"0": (base, plain), "1": (base, penalized(6))})
    same(outputs["0"], Sampler(store).one(base, plain))
    same(outputs["1"], Sampler(store).one(base, penalized(6)))
