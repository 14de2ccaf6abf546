"""`SlimeArgumentBuilder`: from a Hugging Face config, GPUs and constraints to a plan, or a refusal.

A pure function: no file, clock, environment or randomness. The search is over all layouts; it keeps
those that are legal (`layouts.faults`) and fit (`memory_estimate`), and takes the cheapest
(`layouts.cost`), the least parallel among equals.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tinkercloud.errors import PlanRefused
from tinkercloud.planning import memory_estimate as memory
from tinkercloud.planning.engine_arguments import megatron_arguments, sglang_arguments
from tinkercloud.planning.layouts import candidates, cost, faults
from tinkercloud.planning.model_shape import ModelShape
from tinkercloud.planning.model_table import read_shape, untrainable
from tinkercloud.planning.plan import GIB, ClusterShape, Layout, Plan, PlanConstraints
from tinkercloud.planning.plan_reasons import Search, explain
from tinkercloud.planning.rollout_plan import Rollout, rollout_choices

DEFAULT_SEQ_LEN = 8192
MAX_GPUS = 4096  # in the search for how many would do
_SIZES = ("tp", "pp", "cp", "ep", "etp", "dp", "rollout_tp")


@dataclass(frozen=True, slots=True)
class SlimeArgumentBuilder:
    """Plans for one cluster."""

    cluster: ClusterShape

    def build(self, config: Mapping[str, Any], constraints: PlanConstraints | None = None) -> Plan:
        """The plan for the network of a `config.json`.

        Constraints are kept as they are, or PlanRefused gives every reason against a plan: the
        architecture, sizes that do not divide, memory that is missing. Nodes whose number divides
        badly may be left idle: `Plan.cluster` is what is used.
        """
        constraints = constraints or PlanConstraints()
        if reasons := _out_of_range(self.cluster, constraints):
            raise PlanRefused(tuple(reasons))
        shape = read_shape(config)
        max_seq_len = constraints.max_seq_len or min(shape.max_positions, DEFAULT_SEQ_LEN)
        if reasons := [*untrainable(shape, max_seq_len), *_too_long(shape, max_seq_len)]:
            raise PlanRefused(tuple(reasons))
        planner = _Planner(shape, self.cluster, constraints, max_seq_len)
        rollouts = rollout_choices(shape, self.cluster, constraints, max_seq_len)
        search, rollout = planner.best(rollouts)
        if rollout is not None and search.chosen is not None:
            return planner.plan(search, search.chosen, rollout)
        if fewer := planner.on_fewer_nodes():
            return fewer
        missing = planner.shortage(search)
        if isinstance(rollouts, str):
            missing.append(rollouts)
        raise PlanRefused((*missing, *planner.advice()))


@dataclass(frozen=True, slots=True)
class _Planner:
    """One network, one cluster, one set of constraints."""

    shape: ModelShape
    cluster: ClusterShape
    constraints: PlanConstraints
    max_seq_len: int

    def best(self, rollouts: list[Rollout] | str) -> tuple[Search, Rollout | None]:
        """The first engines alongside which some layout fits, and the search that chose it."""
        legal, illegal = self.measured()
        search = self.search(legal, illegal, 0)
        if isinstance(rollouts, str) or not search.fits:
            return search, None
        for rollout in rollouts:
            engine_bytes = rollout.weights if rollout.layout.colocated else 0
            search = self.search(legal, illegal, engine_bytes)
            if search.fits:
                return search, rollout
        return search, None

    def on_fewer_nodes(self) -> Plan | None:
        """A plan that leaves nodes idle, the fewest, unless sizes were asked for."""
        if any(getattr(self.constraints, name) is not None for name in _SIZES):
            return None
        node, gpus = self.cluster.gpus_per_node, self.cluster.gpus
        near = range(gpus - node, max(0, gpus - 9 * node), -node)
        far = (node * 2**power for power in range(12, -1, -1) if node * 2**power < gpus)
        for number in (*near, *far):
            if number <= self.constraints.rollout_gpus:
                continue
            cluster = replace(self.cluster, gpus=number)
            smaller = replace(self, cluster=cluster)
            rollouts = rollout_choices(self.shape, cluster, self.constraints, self.max_seq_len)
            search, rollout = smaller.best(rollouts)
            if rollout is not None and search.chosen is not None:
                plan = smaller.plan(search, search.chosen, rollout)
                idle = f"{gpus - number} of {gpus} GPUs idle: no layout on all of them fits"
                return replace(plan, reasons=(*plan.reasons, idle))
        return None

    def measured(self) -> tuple[dict[Layout, memory.Training], dict[Layout, list[str]]]:
        """Every layout: what the legal ones hold, what is wrong with the others."""
        legal: dict[Layout, memory.Training] = {}
        illegal: dict[Layout, list[str]] = {}
        for layout in candidates(self.shape, self.cluster, self.constraints, self.max_seq_len):
            reasons = faults(self.shape, self.cluster, self.constraints, layout, self.max_seq_len)
            if reasons:
                illegal[layout] = reasons
            else:
                legal[layout] = self.held(layout)
        return legal, illegal

    def search(
        self,
        legal: dict[Layout, memory.Training],
        illegal: dict[Layout, list[str]],
        engine_bytes: int,
    ) -> Search:
        """The cheapest layout that fits, or where none does, the one that lacks least.

        engine_bytes: bytes of an engine's weights on the same GPU while new ones are sent.
        """
        colocated = self.constraints.rollout_gpus == 0
        room = memory.usable_bytes(self.cluster) - memory.processes_bytes(colocated)
        need = {layout: max(h.total, h.syncing + engine_bytes) for layout, h in legal.items()}
        costs = {layout: self.cost(layout) for layout in legal}

        def by_cost(layout: Layout) -> tuple[float, ...]:
            return (costs[layout], layout.pp, layout.tp, layout.cp, layout.ep)

        def by_need(layout: Layout) -> tuple[float, ...]:
            return (need[layout], *by_cost(layout))

        fitting = [layout for layout in legal if need[layout] <= room]
        chosen = min(fitting, key=by_cost) if fitting else min(legal, key=by_need, default=None)
        return Search(room, chosen, legal, need, costs, illegal)

    def held(self, layout: Layout) -> memory.Training:
        return memory.training(
            self.shape, layout, self.constraints.lora_rank, self.constraints.dtype
        )

    def cost(self, layout: Layout) -> float:
        return cost(self.shape, self.cluster, layout, lora=self.constraints.lora_rank is not None)

    def shortage(self, search: Search) -> list[str]:
        """Why there is no layout: what the least faulty one lacks."""
        if search.chosen is None:
            return min(search.illegal.values(), key=len)
        held, layout = search.memory[search.chosen], search.chosen
        if search.fits:
            return []
        where = (
            f"where it needs least (tp {layout.tp}, pp {layout.pp}, cp {layout.cp}, "
            f"ep {layout.ep}, recompute {layout.recompute}"
        )
        if held.total <= search.room:
            return [
                f"sending weights needs {_gib(search.need[layout])} of each GPU {where}: weights "
                f"of trainer and engine, and a bucket between them), and has {_gib(search.room)}; "
                "GPUs set aside for sampling would help"
            ]
        return [
            f"training needs {_gib(held.total)} of each GPU {where}: weights "
            f"{_gib(held.weights)}, gradients and optimizer "
            f"{_gib(held.gradients + held.optimizer + held.adapters)}, activations "
            f"{_gib(held.activations)}), and has {_gib(search.room)}"
        ]

    def advice(self) -> list[str]:
        """How many GPUs of this kind would do, if any number does."""
        gpus = self.cluster.gpus
        while (gpus := 2 * gpus) <= MAX_GPUS:
            rollout_gpus = self.constraints.rollout_gpus * gpus // self.cluster.gpus
            constraints = replace(self.constraints, rollout_gpus=rollout_gpus)
            larger = replace(
                self, cluster=replace(self.cluster, gpus=gpus), constraints=constraints
            )
            rollouts = rollout_choices(self.shape, larger.cluster, constraints, self.max_seq_len)
            if larger.best(rollouts)[1] is not None:
                return [f"{gpus} such GPUs would do"]
        return []

    def plan(self, search: Search, layout: Layout, rollout: Rollout) -> Plan:
        shape, constraints, rank = self.shape, self.constraints, self.constraints.lora_rank
        held, colocated = search.memory[layout], rollout.layout.colocated
        sglang = sglang_arguments(
            shape, self.cluster, rollout.layout, self.max_seq_len, constraints
        )
        return Plan(
            architecture=shape.architecture,
            parameters=shape.parameters,
            active_parameters=shape.active_parameters,
            trained_parameters=_trained(shape, rank),
            cluster=self.cluster,
            layout=layout,
            rollout=rollout.layout,
            lora_rank=rank,
            expert_lora_rank=memory.expert_rank(shape, rank) if rank and shape.experts else None,
            max_seq_len=self.max_seq_len,
            logits_chunk_tokens=memory.LOGITS_CHUNK_TOKENS,
            distributed_optimizer=True,
            usable_bytes=memory.usable_bytes(self.cluster),
            phases=(
                memory.training_phase(held, colocated=colocated),
                memory.sync_phase(held, rollout.weights, colocated=colocated),
                memory.sampling_phase(
                    self.cluster,
                    rollout.weights,
                    rollout.adapters,
                    rollout.cache,
                    colocated=colocated,
                ),
            ),
            megatron=megatron_arguments(shape, layout, self.max_seq_len, constraints.dtype),
            sglang=sglang,
            reasons=explain(shape, self.cluster, constraints, search, sglang),
        )


def _trained(shape: ModelShape, lora_rank: int | None) -> int:
    if lora_rank is None:
        return shape.parameters
    count = shape.head(shape.vocab_size).rank_adapter(lora_rank, 1, 1)
    for experts in shape.expert_layers:
        for linear in shape.linears(experts):
            rank = memory.expert_rank(shape, lora_rank) if linear.expert else lora_rank
            count += linear.rank_adapter(rank, 1, 1) if linear.adapted else 0
    return count


def _out_of_range(cluster: ClusterShape, constraints: PlanConstraints) -> list[str]:
    """Figures that no cluster and no constraint can have."""
    figures = {
        "gpus": cluster.gpus,
        "gpus per node": cluster.gpus_per_node,
        "GPU memory": cluster.gpu_memory_bytes,
        "LoRA rank": constraints.lora_rank,
        "max sequence length": constraints.max_seq_len,
        "tokens of a micro-batch": constraints.microbatch_tokens,
        **{name: getattr(constraints, name) for name in _SIZES},
    }
    reasons = [
        f"{name} must be at least 1, not {value}"
        for name, value in figures.items()
        if value is not None and value < 1
    ]
    if cluster.gpus > MAX_GPUS:
        reasons.append(f"{cluster.gpus} GPUs: plans are made for {MAX_GPUS} at most")
    if (
        not reasons
        and cluster.gpus > cluster.gpus_per_node
        and cluster.gpus % cluster.gpus_per_node
    ):
        reasons.append(f"{cluster.gpus} GPUs are no whole nodes of {cluster.gpus_per_node}")
    if not 0 <= constraints.rollout_gpus < max(1, cluster.gpus):
        reasons.append(
            f"{constraints.rollout_gpus} of {cluster.gpus} GPUs cannot be set aside for sampling"
        )
    return reasons


def _too_long(shape: ModelShape, max_seq_len: int) -> list[str]:
    if max_seq_len <= shape.max_positions:
        return []
    return [f"sequences of {max_seq_len} tokens: the network knows {shape.max_positions} positions"]


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
