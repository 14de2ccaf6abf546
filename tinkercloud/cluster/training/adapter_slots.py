"""A model's adapter on one rank: its parameters, and how they are gathered and sharded."""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tinkercloud.cluster.lora.layers import Factor, Pair, factors
from tinkercloud.cluster.lora.sites import Shape, Site, dense_shapes, expert_shapes
from tinkercloud.core.types import LoraSpec
from tinkercloud.planning.plan import Plan
from tinkercloud.weights.adapters import adapted_modules, fresh_adapter

FullTensors = dict[str, Tensor]
"""Unsharded float32 tensors by "MODULE.lora_A" and "MODULE.lora_B"."""


class AdapterShapes:
    """Which modules a spec adapts under a plan, and with which rank.

    Experts have adapters only where the plan gives them a rank (`expert_lora_rank`), in its
    proportion to `lora_rank`.
    """

    def __init__(self, plan: Plan):
        self._plan = plan
        self._dense = dense_shapes(plan.megatron)
        self._experts = expert_shapes(plan.megatron) if plan.expert_lora_rank else {}

    @property
    def modules(self) -> Mapping[str, Shape]:
        return {**self._dense, **self._experts}

    def expert_rank(self, spec: LoraSpec) -> int:
        assert self._plan.lora_rank is not None and self._plan.expert_lora_rank is not None
        return max(1, spec.rank * self._plan.expert_lora_rank // self._plan.lora_rank)

    def ranks(self, spec: LoraSpec) -> dict[str, int]:
        """module -> rank, in the order of checkpoints."""
        ranks = dict.fromkeys(adapted_modules(spec, self._dense), spec.rank)
        if self._experts and spec.train_mlp:
            ranks |= dict.fromkeys(self._experts, self.expert_rank(spec))
        return ranks

    def initial(self, spec: LoraSpec, modules: Iterable[str]) -> FullTensors:
        """The initial adapter of a seed, for these modules.

        Outside the experts it is the adapter that other backends draw from the seed: they draw all
        modules in one order, so all are drawn here too. An expert's is drawn from the seed and its
        name, so that no rank must draw those of all experts.
        """
        names = set(modules)
        cpu = torch.device("cpu")
        full: FullTensors = {}
        for name, (a, b) in fresh_adapter(spec, self._dense, cpu).items():
            if name in names:
                full[f"{name}.lora_A"], full[f"{name}.lora_B"] = a, b
        for name in names & self._experts.keys() & self.ranks(spec).keys():
            seed = (spec.seed ^ zlib.crc32(name.encode()) << 20) % 2**63
            single = replace(spec, rank=self.expert_rank(spec), seed=seed)
            a, b = fresh_adapter(single, {name: self._experts[name]}, cpu)[name]
            full[f"{name}.lora_A"], full[f"{name}.lora_B"] = a, b
        return full


class AdapterSlot(nn.Module):
    """float32 A and B of every adapted projection on this rank.

    tensors, layout: by "MODULE.lora_A" and "MODULE.lora_B". pairs: by module, for the forward pass.
    """

    def __init__(
        self, spec: LoraSpec, ranks: Mapping[str, int], sites: list[Site], device: torch.device
    ):
        super().__init__()
        self.spec = spec
        self.tensors: dict[str, nn.Parameter] = {}
        self.layout: dict[str, Factor] = {}
        self.pairs: dict[str, Pair] = {}
        for site in sites:
            for projection in site.projections:
                if projection.name in ranks:
                    rank = ranks[projection.name]
                    a = torch.zeros(rank, projection.columns, device=device)
                    b = torch.zeros(projection.rows, rank, device=device)
                    self._add(site, projection.name, a, b)

    def _add(self, site: Site, name: str, a: Tensor, b: Tensor) -> None:
        for leaf, tensor, factor in zip("AB", (a, b), factors(site), strict=True):
            parameter = nn.Parameter(tensor)
            # Megatron's DDP puts parameters with allreduce False into the buffers of experts, whose
            # gradients are reduced over the expert-data-parallel group.
            parameter.allreduce = not site.is_expert  # type: ignore[attr-defined]
            self.tensors[f"{name}.lora_{leaf}"] = parameter
            self.layout[f"{name}.lora_{leaf}"] = factor
            self.register_parameter(f"{name}.lora_{leaf}".replace(".", "/"), parameter)
        a, b = self.tensors[f"{name}.lora_A"], self.tensors[f"{name}.lora_B"]
        self.pairs[name] = (a, b, self.spec.alpha / a.shape[0])

    def shard(self, name: str, full: Tensor) -> Tensor:
        """This rank's shard of a full tensor; rows that pad the vocabulary are 0."""
        factor, parameter = self.layout[name], self.tensors[name]
        if factor.dim is None:
            return full
        size = parameter.shape[factor.dim]
        start, end = factor.group.rank() * size, full.shape[factor.dim]
        shard = full.narrow(factor.dim, min(start, end), max(0, min(size, end - start)))
        if shard.shape == parameter.shape:
            return shard
        padded = torch.zeros(parameter.shape, dtype=full.dtype, device=full.device)
        padded[: len(shard)] = shard
        return padded

    def gather(self, name: str, shard: Tensor, full_shapes: Mapping[str, Shape]) -> Tensor:
        """The full tensor from its shards, without padding. Collective over its tensor-parallel
        group. full_shapes: (out, in) by module."""
        factor = self.layout[name]
        if factor.dim is None:
            return shard
        full = shard
        if factor.group.size() > 1:
            shards = [torch.empty_like(shard) for _ in range(factor.group.size())]
            dist.all_gather(shards, shard.contiguous(), group=factor.group)
            full = torch.cat(shards, factor.dim)
        module, _, _ = name.rpartition(".")
        return full.narrow(factor.dim, 0, full_shapes[module][factor.dim])

    def is_counted(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether a norm counts this rank's part: of copies, only the first rank's."""
        factor = self.layout[name.replace("/", ".")]
        return factor.dim is not None or factor.group.rank() == 0

    def reduce_gradients(self, ddp: DistributedDataParallel) -> None:
        """Sum the accumulated gradients over all ranks that contribute to them."""
        # Data-parallel ranks first, as Megatron's finalize_model_grads: partial gradients are
        # summed once for the whole accumulation, not in every micro-batch.
        ddp.finish_grad_sync()
        by_group: dict[ProcessGroup, list[Tensor]] = {}
        for name, factor in self.layout.items():
            if factor.partial:
                by_group.setdefault(factor.group, []).append(self.tensors[name].main_grad)  # type: ignore[attr-defined]
        for group, gradients in by_group.items():
            # One message for each group instead of one for each small factor.
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, group=group)
            sums = flat.split([gradient.numel() for gradient in gradients])
            for gradient, total in zip(gradients, sums, strict=True):
                gradient.copy_(total.view(gradient.shape))

    def load(self, full: FullTensors) -> None:
        with torch.no_grad():
            for name, parameter in self.tensors.items():
                parameter.copy_(self.shard(name, full[name]))
