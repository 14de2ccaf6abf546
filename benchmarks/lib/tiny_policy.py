"""Small policies and a task for them: decoders of two layers, trained in seconds.

Several policies that differ in their seed alone are computed at once, as one more axis of every
tensor: at this size a call costs more than its arithmetic.

The task: a prompt of two numbers (a, k) asks for a + k, a + 2k, ... modulo V. The reward is the
share of sampled tokens that are k above the one before, so that what is right depends on what was
sampled. The first policies have seen such sequences with most tokens replaced by random ones.

Axes: E policies, B sequences of a batch, N tokens, P prompt tokens, S sampled, V vocabulary,
D hidden, H heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

V, P, S = 10, 2, 8
D, H, NUM_LAYERS = 32, 2, 2
RIGHT_AT_FIRST = 0.3  # of the tokens that the first policies have seen

Weights = Mapping[str, Tensor]
"""Of E policies, each tensor (E, ...)."""


def shapes() -> dict[str, tuple[int, ...]]:
    layer = {"qkv": (D, 3 * D), "out": (D, D), "up": (D, 4 * D), "down": (4 * D, D)}
    layers = {f"{name}{i}": size for i in range(NUM_LAYERS) for name, size in layer.items()}
    return {"tokens": (V, D), "places": (P + S, D), **layers, "head": (D, V)}


def random_weights(num_policies: int, seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(num_policies, *size, generator=rng) * size[0] ** -0.5
        for name, size in shapes().items()
    }


def logits(weights: Weights, tokens: Tensor) -> Tensor:
    """tokens (E, B, N) -> float32 (E, B, N, V), computed in the weights' number type."""
    E, B, N = tokens.shape
    rows = weights["tokens"].gather(1, tokens.reshape(E, -1, 1).expand(-1, -1, D))
    x = rows + weights["places"][:, :N].repeat(1, B, 1)  # (E, B N, D) from here on
    for i in range(NUM_LAYERS):
        qkv = _normed(x) @ weights[f"qkv{i}"]
        q, k, v = qkv.view(E * B, N, 3, H, D // H).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(E, B * N, D) @ weights[f"out{i}"]
        x = x + functional.gelu(_normed(x) @ weights[f"up{i}"]) @ weights[f"down{i}"]
    return (_normed(x) @ weights["head"]).float().view(E, B, N, V)


def _normed(x: Tensor) -> Tensor:
    return functional.rms_norm(x, (D,))


# ---- samples


@dataclass(frozen=True)
class Rollouts:
    """tokens (E, B, P + S). logprobs (E, B, S): the sampler's. rewards, advantages (E, B)."""

    tokens: Tensor
    logprobs: Tensor
    rewards: Tensor
    advantages: Tensor


def prompts(num_policies: int, num: int, rng: torch.Generator) -> Tensor:
    return torch.randint(1, V, (num_policies, num, P), generator=rng)


def roll_out(weights: Weights, num_prompts: int, group: int, rng: torch.Generator) -> Rollouts:
    """group samples of each prompt; the advantage is the reward above the group's mean."""
    num_policies = weights["head"].shape[0]
    tokens = prompts(num_policies, num_prompts, rng).repeat_interleave(group, 1)
    logprobs = []
    with torch.no_grad():
        for _ in range(S):
            rows = functional.log_softmax(logits(weights, tokens)[:, :, -1], -1)
            drawn = torch.multinomial(rows.exp().flatten(0, 1), 1, generator=rng)
            drawn = drawn.view(num_policies, -1, 1)
            logprobs.append(rows.gather(2, drawn))
            tokens = torch.cat([tokens, drawn], 2)
    rewards = reward(tokens)
    groups = rewards.view(num_policies, num_prompts, group)
    advantages = (groups - groups.mean(2, keepdim=True)).flatten(1)
    return Rollouts(tokens, torch.cat(logprobs, 2), rewards, advantages)


def reward(tokens: Tensor) -> Tensor:
    """The share of sampled tokens that are k above the one before; the first follows a."""
    before = torch.cat([tokens[..., :1], tokens[..., P:-1]], -1)
    return ((before + tokens[..., 1:P]) % V == tokens[..., P:]).float().mean(-1)


def sampled_logprobs(weights: Weights, tokens: Tensor) -> Tensor:
    """(E, B, S), with gradient."""
    rows = functional.log_softmax(logits(weights, tokens[..., :-1])[:, :, P - 1 :], -1)
    return rows.gather(3, tokens[..., P:, None])[..., 0]


# ---- the first policies


def pretrained(num_policies: int, seed: int, num_steps: int = 300) -> dict[str, Tensor]:
    weights = {k: w.requires_grad_() for k, w in random_weights(num_policies, seed).items()}
    optimizer = torch.optim.Adam(weights.values(), lr=3e-3)
    rng = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        loss = -sampled_logprobs(weights, _examples(num_policies, 64, rng)).mean((1, 2)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


def _examples(num_policies: int, num: int, rng: torch.Generator) -> Tensor:
    tokens = prompts(num_policies, num, rng)
    for i in range(S):
        before = tokens[..., :1] if i == 0 else tokens[..., -1:]
        right = (before + tokens[..., 1:P]) % V
        other = torch.randint(0, V, right.shape, generator=rng)
        keep = torch.rand(right.shape, generator=rng) < RIGHT_AT_FIRST
        tokens = torch.cat([tokens, torch.where(keep, right, other)], 2)
    return tokens


# ---- samplers whose numerics differ from the trainer's


def same(weights: Weights) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in weights.items()}


def in_bfloat16(weights: Weights) -> dict[str, Tensor]:
    """Weights and arithmetic; the logits are float32 again."""
    return {name: weight.detach().to(torch.bfloat16) for name, weight in weights.items()}


def quantised(weights: Weights, bits: int = 4) -> dict[str, Tensor]:
    """Rounded to 2^bits - 1 levels, each column of a matrix with a scale of its own."""
    levels = 2 ** (bits - 1) - 1
    rounded = {}
    for name, weight in weights.items():
        scale = weight.detach().abs().amax(1, keepdim=True).clamp(min=1e-8) / levels
        rounded[name] = (weight.detach() / scale).round() * scale
    return rounded
