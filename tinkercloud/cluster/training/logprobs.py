"""Log-probabilities of given targets when the vocabulary and the sequence lie on several ranks.

log p(t) = z_t - max - log sum exp(z - max) in float32, the three terms joined over the
tensor-parallel group (the idea of Megatron's vocab-parallel cross-entropy, for K targets per row).

Axes: n rows, K targets per row, V vocabulary (W columns of it on this rank), C rows of one
context-parallel rank, T rows of all of them.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Group = dist.ProcessGroup


def target_logprobs(logits: Tensor, targets: Tensor, vocab_size: int, group: Group) -> Tensor:
    """float32 (n, K), equal on all ranks of `group`; logits (n, W), targets int64 (n, K).

    Columns from vocab_size on are padding and take no part.
    """
    return _TargetLogprobs.apply(logits, targets, vocab_size, group)  # type: ignore[return-value]


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int, group: Group) -> Tensor:
        width = logits.shape[1]
        start = group.rank() * width
        ctx.real = min(max(vocab_size - start, 0), width)
        wide = logits[:, : ctx.real].float()
        own = (targets >= start) & (targets < start + ctx.real)
        index = torch.where(own, targets - start, 0)
        if ctx.real:
            top = wide.amax(-1, keepdim=True)
            chosen = torch.where(own, wide.gather(1, index), 0.0)
        else:  # a rank may hold nothing but padding
            top = wide.new_full((len(wide), 1), -torch.inf)
            chosen = wide.new_zeros(targets.shape)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        total = (wide - top).exp().sum(-1, keepdim=True)
        joined = torch.cat((total, chosen), -1)
        dist.all_reduce(joined, group=group)
        normaliser = top + joined[:, :1].log()
        ctx.save_for_backward(logits, normaliser, index, own)
        return joined[:, 1:] - normaliser

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grads
        logits, normaliser, index, own = ctx.saved_tensors
        result = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
        if ctx.real:
            probabilities = (logits[:, : ctx.real].float() - normaliser).exp_()
            torch.mul(probabilities, -grad.sum(-1, keepdim=True), out=result[:, : ctx.real])
            result.scatter_add_(1, index, torch.where(own, grad, 0.0))
        return result.to(logits.dtype), None, None, None


def chunked_logprobs(
    hidden: Tensor,
    targets: Tensor,
    unembed: Callable[[Tensor], Tensor],
    logprobs: Callable[[Tensor, Tensor], Tensor],
    chunk_rows: int,
) -> Tensor:
    """float32 (n, K) without ever holding all logits: chunk_rows rows of them at a time.

    hidden (s, D) holds this rank's 1/p of the rows when sequences are parallel over p ranks, and
    then unembed gathers them: s rows -> (p s, W) logits, rank after rank. targets (p s, K).
    Logits are computed again for the gradient.
    """
    parts = len(targets) // len(hidden)
    rows = max(1, chunk_rows // parts)

    def chunk(own: Tensor, wanted: Tensor) -> Tensor:
        return logprobs(unembed(own), wanted)

    by_part = targets.unflatten(0, (parts, len(hidden)))
    found = []
    for own, wanted in zip(hidden.split(rows), by_part.split(rows, 1), strict=True):
        flat = wanted.flatten(0, 1)
        if torch.is_grad_enabled():
            result = checkpoint(chunk, own, flat, use_reentrant=False)
        else:
            result = chunk(own, flat)
        found.append(result.unflatten(0, (parts, len(own))))
    return torch.cat(found, 1).flatten(0, 1)


def gather_rows(own: Tensor, order: Tensor, group: Group) -> Tensor:
    """(T, K) rows of all context-parallel ranks from this rank's (C, K), in whole-sequence order.

    order int64 (T,): concatenated over the ranks, which whole rows each holds. Every rank goes on
    with the same rows and computes the same loss, so the gradient of its own rows is complete.
    """
    if group.size() == 1:
        return own
    return _GatherRows.apply(own, order, group)  # type: ignore[return-value]


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, order: Tensor, group: Group) -> Tensor:
        ctx.own_rows = order.chunk(group.size())[group.rank()]
        gathered = own.new_empty((len(order), *own.shape[1:]))
        dist.all_gather(list(gathered.chunk(group.size())), own.contiguous(), group=group)
        whole = torch.empty_like(gathered)
        whole[order] = gathered
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.own_rows], None, None
