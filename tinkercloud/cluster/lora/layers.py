"""LoRA on Megatron's parallel linears: many adapters on one frozen network.

Each Hugging Face projection has an adapter of its own, so that an export to PEFT only gathers
shards. Sites have forward hooks: the network keeps its modules and parameter names.

How an adapter is sharded over the tensor-parallel ranks (tp of them):

    column linear   A (r, in) replicated   B (out / tp, r)        gradient of A is partial
    row linear      A (r, in / tp)         B (out, r) replicated  gradient of B is partial where
                                                                  each rank has other rows
                                                                  (sequence parallelism)

Partial gradients are summed when a step is taken, not in every micro-batch. Experts' own tensor
parallelism (etp) follows the same table; the token dispatcher reduces their outputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tinkercloud.cluster.lora.sites import Projection, Site


@dataclass(frozen=True, slots=True)
class Factor:
    """How one A or B is sharded over `group`.

    dim: the sharded axis; None: replicated. partial: whether its gradient must be summed over the
    group.
    """

    dim: int | None
    partial: bool
    group: ProcessGroup


def factors(site: Site) -> tuple[Factor, Factor]:
    """How A and B of the site's projections are sharded."""
    is_sharded = site.group.size() > 1
    if site.kind == "column":
        return Factor(None, is_sharded, site.group), Factor(0, False, site.group)
    partial = is_sharded and (site.sequence_parallel or site.is_expert)
    return Factor(1, False, site.group), Factor(None, partial, site.group)


Pair = tuple[Tensor, Tensor, float]
"""A and B on this rank, float32, and alpha / rank."""


class AdapterSwitch:
    """Which adapter the network's forward pass adds; None: none, it computes as the base."""

    def __init__(self, sites: list[Site]):
        self.active: Mapping[str, Pair] | None = None
        self._handles = [
            site.module.register_forward_hook(self._hook(site), with_kwargs=True) for site in sites
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, site: Site) -> Callable[..., Any]:
        def add(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if self.active is None:
                return None
            delta = site_delta(site, self.active, args)
            return None if delta is None else (output[0] + delta, *output[1:])

        return add


def site_delta(site: Site, pairs: Mapping[str, Pair], args: tuple[Any, ...]) -> Tensor | None:
    """What the adapter adds to the site's output, in the input's dtype; None without an adapter.

    args: of the linear: the rows, and for a grouped linear the number of rows of each expert.
    """
    if not any(projection.name in pairs for projection in site.projections):
        return None
    x = _normed(site.module, args[0])
    if not site.is_grouped:
        return _block_delta(site, site.blocks[0], pairs, _column_input(site, x)).to(x.dtype)
    counts = args[1].tolist() if isinstance(args[1], Tensor) else list(args[1])
    parts = [
        _block_delta(site, block, pairs, rows)
        for block, rows in zip(site.blocks, x.split(counts), strict=True)
    ]
    return torch.cat(parts).to(x.dtype)


def _normed(module: Any, x: Tensor) -> Tensor:
    """The input after the norm that Transformer Engine fuses into some linears
    (TELayerNormColumnParallelLinear): the hook sees the input before it."""
    weight = getattr(module, "layer_norm_weight", None)
    if weight is None:
        return x
    if module.config.layernorm_zero_centered_gamma:
        weight = weight + 1
    return F.rms_norm(x, weight.shape, weight, module.config.layernorm_epsilon)


def _column_input(site: Site, x: Tensor) -> Tensor:
    """The rows that this rank's shard of a column linear multiplies, as in Megatron's own: gathered
    with sequence parallelism, else copied (its backward pass sums the gradient)."""
    if site.kind == "row" or site.is_expert or site.group.size() == 1:
        return x
    if site.sequence_parallel:
        return tensor_parallel.gather_from_sequence_parallel_region(x, group=site.group)
    return tensor_parallel.copy_to_tensor_model_parallel_region(x, group=site.group)


def _block_delta(
    site: Site, block: tuple[Projection, ...], pairs: Mapping[str, Pair], x: Tensor
) -> Tensor:
    wide = x.float()
    parts = []
    for projection in block:
        if projection.name not in pairs:
            parts.append(wide.new_zeros((*wide.shape[:-1], projection.rows)))
            continue
        a, b, scale = pairs[projection.name]
        inner = F.linear(wide, a)
        if site.kind == "row" and not site.is_expert and site.group.size() > 1:
            inner = _reduced(site, inner)
        parts.append(F.linear(inner, b) * scale)
    delta = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return delta if site.order is None else delta[..., site.order.to(delta.device)]


def _reduced(site: Site, inner: Tensor) -> Tensor:
    """The ranks' partial products, summed. Before B, where a row has r columns instead of out."""
    if site.sequence_parallel:
        return tensor_parallel.reduce_scatter_to_sequence_parallel_region(inner, group=site.group)
    return tensor_parallel.reduce_from_tensor_model_parallel_region(inner, group=site.group)


def weight_delta(site: Site, block: int, pairs: Mapping[str, Pair]) -> Tensor | None:
    """What merging adds to a block's weight on this rank: float32, of its shape; None: nothing."""
    adapted = [p for p in site.blocks[block] if p.name in pairs]
    if not adapted:
        return None
    parts = []
    for projection in site.blocks[block]:
        a, b, scale = pairs[adapted[0].name]
        if projection in adapted:
            a, b, scale = pairs[projection.name]
            parts.append((b @ a) * scale)
        else:
            parts.append(a.new_zeros(projection.rows, projection.columns))
    delta = torch.cat(parts)
    return delta if site.order is None else delta[site.order.to(delta.device)]
