"""Policy gradients from samples of another policy: the losses to choose among, training with each,
and how far each one's gradient is from the true one.

Axes: E policies, B sequences, S sampled tokens (see tiny_policy).
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.lib.tiny_policy import Rollouts, Weights, roll_out, same, sampled_logprobs
from tinkercloud.losses import LOSSES, load_loss

NUM_PROMPTS, GROUP = 8, 8  # of a training step
BOUND = 2.0

OffPolicyLoss = Callable[[Tensor, Rollouts], Tensor]
"""Elementwise (E, B, S), of the policy's log-probabilities (E, B, S) and the samples."""


def product_loss(name: str, **changes: float) -> OffPolicyLoss:
    """One of the server's, by token. changes: to its default configuration."""
    function, config = load_loss(name), {**LOSSES[name].defaults, **changes}

    def loss(logprobs: Tensor, rollouts: Rollouts) -> Tensor:
        advantages = rollouts.advantages[..., None].expand_as(logprobs)
        inputs = {"logprobs": rollouts.logprobs, "advantages": advantages}
        return function(logprobs, {**inputs, "sampled_mask": torch.ones_like(logprobs)}, config)

    return loss


def weighted(weight: Callable[[Tensor], Tensor]) -> OffPolicyLoss:
    """REINFORCE with importance weights without gradient: -w A l. weight: of log ratios."""

    def loss(logprobs: Tensor, rollouts: Rollouts) -> Tensor:
        weights = weight((logprobs - rollouts.logprobs).detach())
        return -weights * rollouts.advantages[..., None] * logprobs

    return loss


def _masked(delta: Tensor) -> Tensor:
    return torch.where(delta.abs() <= math.log(BOUND), delta.exp(), 0.0)


def _sequence_product(delta: Tensor) -> Tensor:
    return delta.sum(-1, keepdim=True).exp().clamp(max=BOUND)


def _sequence_mean(delta: Tensor) -> Tensor:
    return delta.mean(-1, keepdim=True).exp().clamp(max=BOUND)


CANDIDATES: Mapping[str, OffPolicyLoss] = {
    "no correction": weighted(torch.ones_like),
    "importance_sampling": product_loss("importance_sampling"),
    "ppo": product_loss("ppo"),
    "truncated at 1": product_loss("stable_reinforce", clip_high_threshold=1.0),
    "truncated at 2": product_loss("stable_reinforce", clip_high_threshold=2.0),
    "truncated at 4": product_loss("stable_reinforce", clip_high_threshold=4.0),
    "masked by token": weighted(_masked),
    "sequence, product": weighted(_sequence_product),
    "sequence, mean": weighted(_sequence_mean),
}


@dataclass(frozen=True)
class Setting:
    """staleness: how many steps old the sampling weights are. sampler: what makes them of the
    trainer's."""

    name: str
    staleness: int
    sampler: Callable[[Weights], dict[str, Tensor]] = same


@dataclass(frozen=True)
class Trained:
    """rewards (E,): of the trained policies. norms (T, E): of the gradient at each step."""

    rewards: Tensor
    norms: Tensor


def train(
    first: Weights, loss: OffPolicyLoss, setting: Setting, num_steps: int, learning_rate: float
) -> Trained:
    weights = {name: w.clone().requires_grad_() for name, w in first.items()}
    optimizer = torch.optim.Adam(weights.values(), lr=learning_rate, betas=(0.9, 0.95), eps=1e-8)
    rng = torch.Generator().manual_seed(1)
    samplers = deque(maxlen=setting.staleness + 1)
    norms = []
    for _ in range(num_steps):
        samplers.append(setting.sampler(weights))
        rollouts = roll_out(samplers[0], NUM_PROMPTS, GROUP, rng)
        optimizer.zero_grad()
        backward(weights, loss, rollouts)
        norms.append(flat_gradient(weights).norm(dim=1))
        optimizer.step()
    rewards = roll_out(weights, 64, 4, rng).rewards.mean(1)
    return Trained(rewards, torch.stack(norms))


def backward(weights: Weights, loss: OffPolicyLoss, rollouts: Rollouts) -> None:
    """The mean over the sequences of a policy's loss; policies do not touch each other."""
    logprobs = sampled_logprobs(weights, rollouts.tokens)
    loss(logprobs, rollouts).sum(2).mean(1).sum().backward()


def flat_gradient(weights: Weights) -> Tensor:
    """(E, number of parameters)"""
    gradients = [w.grad.flatten(1) for w in weights.values() if w.grad is not None]
    return torch.cat(gradients, 1)


@dataclass(frozen=True)
class Estimate:
    """Of the true gradient g, medians over policies. bias: |E[e] - g| / |g|. noise: the root of
    E |e - E[e]|^2, by |g|. cosine: of E[e] and g."""

    bias: float
    noise: float
    cosine: float


@dataclass(frozen=True)
class Pair:
    """A policy and another one that samples for it, each of E; the policy's true gradient, drawn
    twice: (2, E, params)."""

    policy: Weights
    sampler: Weights
    truth: Tensor


def pair_of(setting: Setting, first: Weights, num_steps: int, num_batches: int) -> Pair:
    """The policy has trained for num_steps on-policy; the sampler is as the setting says."""
    rng = torch.Generator().manual_seed(2)
    weights = {name: w.clone().requires_grad_() for name, w in first.items()}
    optimizer = torch.optim.Adam(weights.values(), lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    loss, samplers = CANDIDATES["no correction"], deque(maxlen=setting.staleness + 1)
    for _ in range(num_steps):
        samplers.append(setting.sampler(weights))
        optimizer.zero_grad()
        backward(weights, loss, roll_out(weights, NUM_PROMPTS, GROUP, rng))
        optimizer.step()
    if setting.staleness == 0:
        samplers.append(setting.sampler(weights))
    policy = same(weights)
    # on-policy REINFORCE: unbiased, but for the group's mean as its baseline, which scales it
    # by 1 - 1 / GROUP for all losses alike
    halves = [gradients(policy, policy, loss, num_batches, rng).mean(0) for _ in range(2)]
    return Pair(policy, samplers[0], torch.stack(halves))


def gradients(
    policy: Weights, sampler: Weights, loss: OffPolicyLoss, num: int, rng: torch.Generator
) -> Tensor:
    """(num, E, params): of so many batches that the sampler draws."""
    batches = []
    for _ in range(num):
        leaves = {name: w.detach().clone().requires_grad_() for name, w in policy.items()}
        backward(leaves, loss, roll_out(sampler, NUM_PROMPTS, GROUP, rng))
        batches.append(flat_gradient(leaves))
    return torch.stack(batches)


def estimate(pair: Pair, loss: OffPolicyLoss, num_batches: int) -> Estimate:
    """The squared bias is a product of two differences whose noises are independent, so that the
    noise of the means does not count as bias."""
    rng = torch.Generator().manual_seed(3)
    drawn = gradients(pair.policy, pair.sampler, loss, num_batches, rng)
    ours = torch.stack([half.mean(0) for half in drawn.chunk(2)])
    differences = ours - pair.truth
    squared = (differences[0] * differences[1]).sum(1).clamp(min=0.0)
    scale = (pair.truth[0] * pair.truth[1]).sum(1).clamp(min=1e-12).sqrt()
    spread = (drawn - drawn.mean(0)).square().sum(2).mean(0).sqrt()
    return Estimate(
        bias=float((squared.sqrt() / scale).median()),
        noise=float((spread / scale).median()),
        cosine=float(torch.cosine_similarity(ours.mean(0), pair.truth.mean(0), dim=1).median()),
    )
