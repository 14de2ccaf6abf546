"""Collectives over parts of unequal size, which NCCL has and gloo has not: with expert tensor
parallelism each rank gathers the others' tokens as they are."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_all_gather, _reduce_scatter = dist.all_gather, dist.reduce_scatter


def install() -> None:
    dist.all_gather = _gathered  # type: ignore[assignment]
    dist.reduce_scatter = _scattered  # type: ignore[assignment]


def _gathered(parts: list[Tensor], own: Tensor, group: Any = None, async_op: bool = False) -> Any:
    if len({part.shape for part in parts}) == 1:
        return _all_gather(parts, own, group=group, async_op=async_op)
    for rank, part in enumerate(parts):
        if rank == group.rank():
            part.copy_(own)
        dist.broadcast(part, dist.get_global_rank(group, rank), group=group)
    return None


def _scattered(
    own: Tensor, parts: list[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None,
    async_op: bool = False,
) -> Any:  # fmt: skip
    if len({part.shape for part in parts}) == 1:
        return _reduce_scatter(own, parts, op=op, group=group, async_op=async_op)
    joined = torch.cat(parts)
    dist.all_reduce(joined, op, group=group)
    own.copy_(joined.split([len(part) for part in parts])[group.rank()])
    return None
