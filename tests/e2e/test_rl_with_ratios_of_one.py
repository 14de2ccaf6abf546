"""A hundred steps of RL on-policy: the official SDK, real weights, the server's own defaults, and
every importance ratio exactly 1."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.e2e.clients import Client, logprobs_of, on_policy_gauges
from tests.serving import Server
from tinkercloud.embedded.native.compiler import library

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler here")

NUM_STEPS = 100
PROMPTS = (
    "The ship that never answers",
    "On the third day of the storm the lighthouse keeper wrote",
)
Ids = list[int]


@dataclass(frozen=True)
class Episode:
    prompt: Ids
    sample: Any
    advantage: float

    def datum(self, client: Client) -> Any:
        tokens, held = [*self.prompt, *self.sample.tokens], len(self.prompt) - 1
        return client.datum(
            tokens[:-1],
            target_tokens=tokens[1:],
            logprobs=[0.0] * held + list(self.sample.logprobs),
            advantages=[0.0] * held + [self.advantage] * len(self.sample.tokens),
        )


def played(client: Client, sampler: Any, prompts: Sequence[Ids], seed: int) -> list[Episode]:
    """Four of each prompt; what is rewarded is a frequent token. Advantages are group-centred."""
    params = client.params(max_tokens=8, seed=seed, temperature=1.0, stop=[])
    futures = [sampler.sample(client.prompt(prompt), 4, params) for prompt in prompts]
    episodes = []
    for prompt, future in zip(prompts, futures, strict=True):
        group = future.result().sequences
        rewards = np.array([reward(sample) for sample in group])
        advantages = (rewards - rewards.mean()).tolist()
        episodes += [Episode(prompt, *pair) for pair in zip(group, advantages, strict=True)]
    return episodes


def reward(sample: Any) -> float:
    return float(np.mean(np.array(sample.tokens) < 1000))


def assert_ratios_of_one(output: Any, episodes: Sequence[Episode]) -> None:
    for i, episode in enumerate(episodes):
        sampled = np.array(episode.sample.logprobs, np.float32)
        assert (np.exp(logprobs_of(output, i)[-len(sampled) :] - sampled) == 1).all()


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[Ids]:
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.mark.slow
def test_a_hundred_steps_of_rl_have_ratios_of_one(
    official: Client, server: Server, prompts: list[Ids]
) -> None:
    client = official
    model, num_tokens = client.model(rank=16, seed=3), 0
    for step in range(NUM_STEPS):
        sampler = model.save_weights_and_get_sampling_client().result()
        episodes = played(client, sampler, prompts, seed=step)
        whole = [client.supervised([*e.prompt, *e.sample.tokens]) for e in episodes]
        scoring = model.forward(whole, "cross_entropy")
        data = [episode.datum(client) for episode in episodes]
        training = model.forward_backward(data, "importance_sampling")
        stepping = model.optim_step(client.adam(1e-4))
        assert_ratios_of_one(scoring.result(), episodes)
        assert_ratios_of_one(training.result(), episodes)
        metrics = stepping.result().metrics
        num_trained = sum(len(e.sample.tokens) for e in episodes if e.advantage)
        assert metrics.get("on_policy_tokens:sum", 0) == num_trained
        assert metrics.get("on_policy_ratio_deviation:max", 0) == 0
        assert (metrics["unclipped_grad_l2:mean"] > 0) == (num_trained > 0)  # the weights move
        num_tokens += num_trained
    assert num_tokens > 5 * NUM_STEPS
    since_start = on_policy_gauges(server)
    assert since_start["tokens"] == num_tokens
    assert since_start["ratio_deviation_max"] == since_start["logprob_deviation_mean"] == 0
