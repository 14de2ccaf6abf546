"""A draft head over whole sequences, as it will be used: on its own outputs, a few steps deep.

Step 1 reads the target's features everywhere. In step j every row is the j-th token of a draft that
began j - 1 rows before: it reads the head's output of the row before from step j - 1, attends to
the target's features up to where its draft began, and to its own draft since (training-time test,
EAGLE-3 2503.01840; HASS 2408.15766). All drafts of a step are computed at once.

Axes: B sequences, N rows, L fused layers, D hidden, Vd draft vocabulary, J steps; Hkv, G, Dh as in
`head`.
"""

import torch
from torch import Tensor

from tinkercloud.speculative.head.head import Head, Params, Projected, mix, scores


def unroll(
    head: Head, params: Params, hidden: Tensor, tokens: Tensor, num_steps: int
) -> list[Tensor]:
    """hidden (B, N, L, D) of the target, tokens int64 (B, N): the token after each of its
    positions. The block's outputs (B, N, D) of each step.

    Row i of step j means something for i >= j - 1. Shorter sequences are padded on the right, with
    anything: attention is causal.
    """
    feature = head.fuse(params, hidden)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    outputs: list[Tensor] = []
    steps: list[Projected] = []
    for _ in range(num_steps):
        steps.append(head.project(params, feature, tokens, positions))
        outputs.append(head.finish(params, feature, _attend(steps)))
        feature = _later(outputs[-1], 1, 1)
    return outputs


def _attend(steps: list[Projected]) -> Tensor:
    """The newest step's queries over what their drafts have seen, (B, Hq, N, Dh)."""
    q, first = steps[-1].q, steps[0]
    depth = len(steps) - 1
    seen = scores(q, first.k)
    rows = torch.arange(q.shape[2], device=q.device)
    hidden = rows[None, :] > rows[:, None] - depth
    parts = [seen.masked_fill(hidden, float("-inf"))]
    for step in range(1, len(steps)):
        parts.append(_scores_by_row(q, _later(steps[step].k, depth - step, 2)))
    shares = torch.softmax(torch.cat(parts, -1), -1)
    count = seen.shape[-1]
    mixed = mix(shares[..., :count], first.v)
    for step in range(1, len(steps)):
        values = _later(steps[step].v, depth - step, 2).unsqueeze(2)
        drafted = shares[..., count + step - 1, None] * values
        mixed = mixed + drafted.flatten(1, 2)
    return mixed


def _scores_by_row(q: Tensor, k: Tensor) -> Tensor:
    """One key for each row: q (B, Hq, N, Dh), k (B, Hkv, N, Dh) -> (B, Hkv, G, N, 1)."""
    grouped = q.unflatten(1, (k.shape[1], -1))
    return (grouped * k.unsqueeze(2)).sum(-1, keepdim=True) * q.shape[-1] ** -0.5


def _later(x: Tensor, count: int, axis: int) -> Tensor:
    """Row i of the result is row i - count, zeros before the first."""
    if count == 0:
        return x
    kept = x.narrow(axis, 0, max(x.shape[axis] - count, 0))
    shape = list(x.shape)
    shape[axis] = x.shape[axis] - kept.shape[axis]
    return torch.cat((x.new_zeros(shape), kept), axis)
