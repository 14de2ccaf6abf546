"""A model's adapter on one rank: its parameters, and how they become whole tensors and back."""

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
from tinkercloud.core.plan import Plan
from tinkercloud.core.types import LoraSpec
from tinkercloud.weights.adapters import fresh_adapter, wanted_modules

Whole = dict[str, Tensor]
"""Whole float32 tensors by "MODULE.lora_A" and "MODULE.lora_B"."""


class AdapterShapes:
    """Which modules a spec adapts under a plan, and with what rank.

    Experts have adapters only where the plan says so, in the plan's proportion to the other ranks.
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
        ranks = dict.fromkeys(wanted_modules(spec, self._dense), spec.rank)
        if self._experts and spec.train_mlp:
            ranks |= dict.fromkeys(self._experts, self.expert_rank(spec))
        return ranks

    def fresh(self, spec: LoraSpec, own: Iterable[str]) -> Whole:
        """The beginning of an adapter, of the modules `own`: a seed means one adapter.

        Outside the experts it is the other backends' adapter. An expert's is drawn from the seed
        and its name, so that no rank draws those of all experts.
        """
        wanted = set(own)
        cpu = torch.device("cpu")
        whole: Whole = {}
        for name, (a, b) in fresh_adapter(spec, self._dense, cpu).items():
            if name in wanted:
                whole[f"{name}.lora_A"], whole[f"{name}.lora_B"] = a, b
        for name in wanted & self._experts.keys() & self.ranks(spec).keys():
            seed = (spec.seed ^ zlib.crc32(name.encode()) << 20) % 2**63
            single = replace(spec, rank=self.expert_rank(spec), seed=seed)
            a, b = fresh_adapter(single, {name: self._experts[name]}, cpu)[name]
            whole[f"{name}.lora_A"], whole[f"{name}.lora_B"] = a, b
        return whole


class AdapterSlot(nn.Module):
    """float32 A and B of every adapted projection on this rank.

    tensors and layout go by "MODULE.lora_A" and "MODULE.lora_B"; pairs is what forward reads.
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
            # What Megatron reads: expert gradients are reduced over another group.
            parameter.allreduce = not site.is_expert  # type: ignore[attr-defined]
            self.tensors[f"{name}.lora_{leaf}"] = parameter
            self.layout[f"{name}.lora_{leaf}"] = factor
            self.register_parameter(f"{name}.lora_{leaf}".replace(".", "/"), parameter)
        own = self.tensors[f"{name}.lora_A"], self.tensors[f"{name}.lora_B"]
        self.pairs[name] = (*own, self.spec.alpha / a.shape[0])

    @property
    def modules_here(self) -> list[str]:
        return list(self.pairs)

    def share(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor; rows that pad the vocabulary are 0."""
        factor, own = self.layout[name], self.tensors[name]
        if factor.dim is None:
            return whole
        size, start = own.shape[factor.dim], factor.group.rank() * own.shape[factor.dim]
        part = whole.narrow(
            factor.dim, min(start, whole.shape[factor.dim]),
            max(0, min(size, whole.shape[factor.dim] - start)),
        )  # fmt: skip
        if part.shape == own.shape:
            return part
        padded = torch.zeros(own.shape, dtype=whole.dtype, device=whole.device)
        padded[: len(part)] = part
        return padded

    def join(self, name: str, part: Tensor, whole_size: Mapping[str, Shape]) -> Tensor:
        """The whole tensor from the parts of its tensor-parallel group (collective over it)."""
        factor = self.layout[name]
        if factor.dim is None or factor.group.size() == 1:
            joined = part
        else:
            parts = [torch.empty_like(part) for _ in range(factor.group.size())]
            dist.all_gather(parts, part.contiguous(), group=factor.group)
            joined = torch.cat(parts, factor.dim)
        if factor.dim is None:
            return joined
        module, _, _ = name.rpartition(".")
        return joined.narrow(factor.dim, 0, whole_size[module][factor.dim])

    def counts(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether this rank's part counts in a norm (copies count once)."""
        factor = self.layout[name.replace("/", ".")]
        return factor.dim is not None or factor.group.rank() == 0

    def join_gradients(self, ddp: DistributedDataParallel) -> None:
        """Sum the accumulated gradients over all ranks that have a part in them."""
        ddp.finish_grad_sync()
        by_group: dict[ProcessGroup, list[Tensor]] = {}
        for name, factor in self.layout.items():
            if factor.partial:
                by_group.setdefault(factor.group, []).append(self.tensors[name].main_grad)  # type: ignore[attr-defined]
        for group, gradients in by_group.items():
            joined = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(joined, group=group)
            for gradient, part in zip(
                gradients, joined.split([g.numel() for g in gradients]), strict=True
            ):
                gradient.copy_(part.view(gradient.shape))

    def fill(self, whole: Whole) -> None:
        with torch.no_grad():
            for name, own in self.tensors.items():
                own.copy_(self.share(name, whole[name]))
