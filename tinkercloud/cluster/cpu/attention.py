"""Core attention and RMS norm of Megatron's layers by plain PyTorch: what Transformer Engine is for
on a GPU. Causal attention with grouped heads, packed (`thd`) sequences, context parallelism.

Axes: S rows of this rank, B batch, H heads of this rank, G their key/value groups, D head size.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


def zigzag_rows(length: int, size: int, rank: int) -> Tensor:
    """Positions of one sequence that context rank `rank` of `size` holds: chunk r and chunk
    2 size - 1 - r of 2 size, so that causal work is even."""
    if size == 1:
        return torch.arange(length)
    chunk = length // (2 * size)
    last = 2 * size - 1 - rank
    first_half = torch.arange(rank * chunk, (rank + 1) * chunk)
    return torch.cat((first_half, torch.arange(last * chunk, (last + 1) * chunk)))


class _Gathered(torch.autograd.Function):
    """(S, ...) of every rank -> (size, S, ...); the gradient goes back summed to its rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        torch.distributed.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out.view(group.size(), *x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_empty(grad.shape[1:])
        flat = grad.contiguous().view(-1, *grad.shape[2:])
        torch.distributed.reduce_scatter_tensor(out, flat, group=ctx.group)
        return out, None


class CpuAttention(MegatronModule):
    """In the place of `core_attention`."""

    def __init__(  # noqa: PLR0913 - Megatron's signature
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **others: Any,
    ):
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.context_group = groups.cp
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(  # noqa: PLR0913 - Megatron's signature
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        packed = packed_seq_params is not None
        if packed:
            query, key, value = (t.unsqueeze(1) if t.dim() == 3 else t for t in (query, key, value))
        size = self.context_group.size()
        lengths = [query.shape[0] * size]
        if packed:
            starts = packed_seq_params.cu_seqlens_q_padded
            starts = packed_seq_params.cu_seqlens_q if starts is None else starts
            lengths = (starts[1:] - starts[:-1]).tolist()
        position, sequence = _rows(lengths, size, self.context_group.rank())
        key_position, key_sequence = position, sequence
        if size > 1:
            key = _Gathered.apply(key, self.context_group).flatten(0, 1)
            value = _Gathered.apply(value, self.context_group).flatten(0, 1)
            parts = [_rows(lengths, size, rank) for rank in range(size)]
            key_position = torch.cat([p for p, _ in parts])
            key_sequence = torch.cat([s for _, s in parts])
        mask = (key_position <= position[:, None]) & (key_sequence == sequence[:, None])
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # B H S D
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        out = out.permute(2, 0, 1, 3).flatten(2)  # S B HD
        return out.flatten(1) if packed else out


def _rows(lengths: list[int], size: int, rank: int) -> tuple[Tensor, Tensor]:
    """(position within its sequence, number of the sequence) of every row of a context rank."""
    positions = [zigzag_rows(length, size, rank) for length in lengths]
    sequences = [torch.full_like(p, i) for i, p in enumerate(positions)]
    return torch.cat(positions), torch.cat(sequences)


class CpuRMSNorm(torch.nn.RMSNorm):
    """Megatron's own wrapper of torch's norm refuses sequence parallelism, which only needs the
    weight to be marked: its gradient is then summed over the tensor-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **others: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel
