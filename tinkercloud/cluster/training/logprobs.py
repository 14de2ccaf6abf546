"""Log-probabilities of targets where vocabulary and sequence are sharded over several ranks.

log p(t) = z_t - max - log sum exp(z - max) in float32, each of the three terms reduced over the
tensor-parallel group (as Megatron's vocab-parallel cross-entropy does, here for K targets per row).

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
        is_local = (targets >= start) & (targets < start + ctx.real)
        index = torch.where(is_local, targets - start, 0)
        if ctx.real:
            top = wide.amax(-1, keepdim=True)
            chosen = torch.where(is_local, wide.gather(1, index), 0.0)
        else:  # a rank may hold nothing but padding
            top = wide.new_full((len(wide), 1), -torch.inf)
            chosen = wide.new_zeros(targets.shape)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        total = (wide - top).exp().sum(-1, keepdim=True)
        # One message for both sums. A target's logit is 0 on all ranks but one.
        sums = torch.cat((total, chosen), -1)
        dist.all_reduce(sums, group=group)
        normaliser = top + sums[:, :1].log()
        ctx.save_for_backward(logits, normaliser, index, is_local)
        return sums[:, 1:] - normaliser

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grads
        logits, normaliser, index, is_local = ctx.saved_tensors
        result = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
        if ctx.real:
            probabilities = (logits[:, : ctx.real].float() - normaliser).exp_()
            torch.mul(probabilities, -grad.sum(-1, keepdim=True), out=result[:, : ctx.real])
            # Added, not set: a row may have the same target twice.
            result.scatter_add_(1, index, torch.where(is_local, grad, 0.0))
        return result.to(logits.dtype), None, None, None


def chunked_logprobs(
    hidden: Tensor,
    targets: Tensor,
    unembed: Callable[[Tensor], Tensor],
    logprobs: Callable[[Tensor, Tensor], Tensor],
    chunk_rows: int,
) -> Tensor:
    """float32 (n, K) from chunk_rows rows of logits at a time, so that not all are ever in memory.

    hidden (s, D): with sequence parallelism over p ranks this rank's 1/p of the rows; unembed then
    gathers them: s rows -> (p s, W) logits, rank after rank. targets (p s, K). The backward pass
    computes the logits again.
    """
    parts = len(targets) // len(hidden)
    rows = max(1, chunk_rows // parts)

    def chunk(rows: Tensor, row_targets: Tensor) -> Tensor:
        return logprobs(unembed(rows), row_targets)

    # A chunk takes the same rows of every rank's part, since unembed gathers these.
    by_part = targets.unflatten(0, (parts, len(hidden)))
    chunks = []
    for part, part_targets in zip(hidden.split(rows), by_part.split(rows, 1), strict=True):
        flat = part_targets.flatten(0, 1)
        if torch.is_grad_enabled():
            result = checkpoint(chunk, part, flat, use_reentrant=False)
        else:
            result = chunk(part, flat)
        chunks.append(result.unflatten(0, (parts, len(part))))
    return torch.cat(chunks, 1).flatten(0, 1)


def gather_rows(local: Tensor, order: Tensor, group: Group) -> Tensor:
    """(T, K) rows of all context-parallel ranks from this rank's (C, K), in sequence order.

    order int64 (T,): for each rank in turn, the positions of its rows. Every rank continues with
    all rows and computes the same loss, so that the gradient of its own rows is complete: the
    backward pass needs no communication.
    """
    if group.size() == 1:
        return local
    return _GatherRows.apply(local, order, group)  # type: ignore[return-value]


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, order: Tensor, group: Group) -> Tensor:
        ctx.local_rows = order.chunk(group.size())[group.rank()]
        gathered = local.new_empty((len(order), *local.shape[1:]))
        dist.all_gather(list(gathered.chunk(group.size())), local.contiguous(), group=group)
        in_order = torch.empty_like(gathered)
        in_order[order] = gathered
        return in_order

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.local_rows], None, None
