"""T9: a run of RL with drafts is the run without: samples, rewards, weights."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.embedded.speculative_engine import Drafting
from tests.embedded.tiny import Sampler, ask, open_store, random_prompt, same, train
from tinkercloud.core.types import AdamParams, Datum, FromModel, LoraSpec, SampleOutput
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.speculative.drafters.suffix_drafter import SuffixDrafter

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")
STEPS, PROMPTS, SAMPLES, TOKENS = 20, 3, 4, 24
LIKED = 64  # tokens below are what is rewarded


class Run:
    """GRPO on the tiny model: the share of low tokens is the reward."""

    def __init__(self, store: ModelStore, drafting: Drafting | None):
        self._store = store
        self._sampler = Sampler(store, num_threads=2, speculate=drafting)
        store.create_model("m", "tiny", LoraSpec(rank=4, seed=0))
        self.samples: list[SampleOutput] = []
        self.rewards: list[np.ndarray] = []

    def step(self, number: int) -> None:
        version = self._store.publish(FromModel("m"))
        requests = {
            str(i): (
                version,
                ask(random_prompt(10 + i, i), n=SAMPLES, max_tokens=TOKENS, seed=100 * number + i,
                    use_eos=False),
            )
            for i in range(PROMPTS)
        }  # fmt: skip
        outputs = self._sampler.run(requests)
        data = []
        for name in requests:  # not in the order in which they are done
            output = outputs[name]
            self.samples.append(output)
            rewards = np.array([(one.tokens < LIKED).mean() for one in output.sequences])
            self.rewards.append(rewards)
            prompt = requests[name][1].prompt
            data += [
                datum(prompt, one.tokens, one.logprobs, advantage)
                for one, advantage in zip(output.sequences, rewards - rewards.mean(), strict=True)
            ]
        train(self._store, "m", data, "importance_sampling")
        self._store.optim_step("m", AdamParams(learning_rate=0.02))

    def weights(self) -> dict[str, torch.Tensor]:
        adapter = self._store.model("m").adapter
        assert adapter is not None
        return {f"{name} {i}": one for name, pair in adapter.items() for i, one in enumerate(pair)}


def datum(prompt: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, advantage: float) -> Datum:
    whole = np.concatenate([prompt, tokens])
    before = np.zeros(len(prompt) - 1, np.float32)
    return Datum(
        whole[:-1].astype(np.int32),
        {
            "target_tokens": whole[1:].astype(np.int64),
            "logprobs": np.concatenate([before, logprobs]).astype(np.float32),
            "advantages": np.concatenate([before, np.full(len(tokens), advantage, np.float32)]),
        },
    )


def test_twenty_steps_of_rl_are_the_same_bits_with_drafts_and_without(
    folder: Path, dtype: torch.dtype
) -> None:
    drafting = Drafting(lambda vocab_size: SuffixDrafter(), 4)
    plain, drafted = (
        Run(open_store(folder, dtype=dtype), None),
        Run(open_store(folder, dtype=dtype), drafting),
    )
    for number in range(STEPS):
        plain.step(number)
        drafted.step(number)
    for one, other in zip(plain.samples, drafted.samples, strict=True):
        same(one, other)
    np.testing.assert_array_equal(np.array(plain.rewards), np.array(drafted.rewards))
    theirs = drafted.weights()
    for name, tensor in plain.weights().items():
        assert torch.equal(tensor, theirs[name]), name
    first, last = np.mean(plain.rewards[:PROMPTS]), np.mean(plain.rewards[-PROMPTS:])
    assert last > first + 0.1, "it learned"
    assert drafting.policy.num_accepted > 20


def test_samples_of_one_prompt_agree_no_more_with_drafts_than_without(folder: Path) -> None:
    """T10: what drafts share, a history, ties no sample to another."""
    store = open_store(folder)
    store.create_model("m", "tiny", LoraSpec(rank=4, seed=0))
    version = store.publish(FromModel("m"))
    drafting = Drafting(lambda vocab_size: SuffixDrafter(), 6)
    sampler = Sampler(store, speculate=drafting)

    def agreement(seed: int) -> tuple[float, float]:
        """Of pairs of samples, at the same place: with drafts, and of samples apart."""
        request = ask(random_prompt(12, 5), n=8, max_tokens=24, seed=seed, use_eos=False)
        tokens = [one.tokens for one in sampler.one(version, request).sequences]
        apart = [
            one.tokens
            for i in range(8)
            for one in Sampler(store)
            .one(version, ask(random_prompt(12, 5), max_tokens=24, seed=1000 * seed + i,
                              use_eos=False))
            .sequences
        ]  # fmt: skip
        return _pairs(tokens), _pairs(apart)

    agreements = np.array([agreement(seed) for seed in range(12)])
    assert drafting.policy.num_accepted > 100
    difference = agreements[:, 0] - agreements[:, 1]
    assert difference.mean() < 4 * difference.std() / np.sqrt(len(difference)) + 0.005


def _pairs(tokens: list[np.ndarray]) -> float:
    equal = [float((tokens[i] == tokens[j]).mean()) for i in range(len(tokens)) for j in range(i)]
    return float(np.mean(equal))
