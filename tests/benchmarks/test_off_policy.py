"""The experiment behind stable_reinforce: its policies, samples, losses and estimates."""

import math
from collections.abc import Iterator

import pytest
import torch

from benchmarks.lib import off_policy, tiny_policy
from benchmarks.lib.off_policy import CANDIDATES, Pair, Setting, estimate, flat_gradient, train
from benchmarks.lib.tiny_policy import P, V, in_bfloat16, quantised, roll_out, sampled_logprobs


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """At this size threads only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def weights(num_policies: int = 2) -> dict[str, torch.Tensor]:
    return tiny_policy.random_weights(num_policies, seed=3)


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def gradient_of(name: str, policy, rollouts) -> torch.Tensor:
    leaves = {key: value.clone().requires_grad_() for key, value in policy.items()}
    off_policy.backward(leaves, CANDIDATES[name], rollouts)
    return flat_gradient(leaves)


def test_the_reward_is_the_share_of_tokens_that_follow_the_one_before() -> None:
    right = [(3 + 4 * i) % V for i in range(1, tiny_policy.S + 1)]
    wrong = [*right[:-1], (right[-1] + 1) % V]
    tokens = torch.tensor([[[3, 4, *right], [3, 4, *wrong]]])
    assert tiny_policy.reward(tokens).tolist() == [[1.0, pytest.approx(7 / 8)]]


def test_sampled_logprobs_are_the_trainers_where_the_numerics_are_the_same() -> None:
    policy = weights()
    rollouts = roll_out(policy, 4, 4, rng())
    assert rollouts.tokens.shape == (2, 16, P + tiny_policy.S)
    torch.testing.assert_close(sampled_logprobs(policy, rollouts.tokens), rollouts.logprobs)
    assert rollouts.advantages.view(2, 4, 4).mean(2).abs().max() < 1e-6


def test_other_numerics_sample_with_other_logprobs() -> None:
    policy, errors = weights(), []
    for sampler in (in_bfloat16(policy), quantised(policy, 4), quantised(policy, 3)):
        rollouts = roll_out(sampler, 4, 4, rng())
        difference = sampled_logprobs(policy, rollouts.tokens) - rollouts.logprobs
        errors.append(float(difference.abs().mean()))
    assert 0 < errors[0] < errors[1] < errors[2]


def test_policies_of_an_ensemble_do_not_touch_each_other() -> None:
    policy = weights()
    rollouts = roll_out(policy, 4, 4, rng())
    both = gradient_of("truncated at 2", policy, rollouts)
    alone = {name: value[1:] for name, value in policy.items()}
    part = off_policy.Rollouts(
        *(getattr(rollouts, name)[1:] for name in ("tokens", "logprobs", "rewards", "advantages"))
    )
    torch.testing.assert_close(gradient_of("truncated at 2", alone, part)[0], both[1])


@pytest.mark.parametrize("name", sorted(CANDIDATES))
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name: str) -> None:
    policy = weights()
    rollouts = roll_out(policy, 4, 4, rng())
    plain = gradient_of("no correction", policy, rollouts)
    torch.testing.assert_close(gradient_of(name, policy, rollouts), plain, rtol=1e-3, atol=1e-6)


def test_weights_are_those_that_the_page_names() -> None:
    delta = torch.tensor([[[math.log(3.0), 0.0, -math.log(3.0)]]])
    assert off_policy._masked(delta).flatten().tolist() == [0.0, 1.0, 0.0]
    assert off_policy._sequence_product(delta).flatten().tolist() == [1.0]
    assert off_policy._sequence_mean(delta + 5).flatten().tolist() == [2.0]


def test_training_learns_the_task() -> None:
    first = tiny_policy.pretrained(2, 0, num_steps=20)
    before = roll_out(first, 32, 4, rng()).rewards.mean()
    trained = train(first, CANDIDATES["truncated at 2"], Setting("one old", 1), 15, 1e-2)
    assert trained.norms.shape == (15, 2)
    assert trained.rewards.mean() > before


def test_an_estimate_tells_bias_from_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = torch.ones(2, 3, 100)
    noise = torch.randn(400, 3, 100, generator=rng())
    monkeypatch.setattr(off_policy, "gradients", lambda *_: 1.25 + 2.0 * noise)
    found = estimate(Pair({}, {}, truth), CANDIDATES["ppo"], 400)
    assert found.bias == pytest.approx(0.25, abs=0.03)
    assert found.noise == pytest.approx(2.0, rel=0.05)
    assert found.cosine > 0.99
