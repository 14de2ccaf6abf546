"""Why a plan is what it is, in sentences: each figure against what would come without it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tinkercloud.planning.engine_arguments import CONCURRENCY
from tinkercloud.planning.memory_estimate import Training, expert_rank, padded_vocab, stages
from tinkercloud.planning.model_shape import ModelShape
from tinkercloud.planning.model_table import ROWS
from tinkercloud.planning.plan import (
    GIB,
    ClusterShape,
    Layout,
    PlanConstraints,
    SglangArguments,
)


@dataclass(frozen=True, slots=True)
class Search:
    """Every layout looked at. room: bytes a rank may hold; memory, need, cost: of the legal ones.

    need: bytes of the fuller of training and sending weights. chosen: the cheapest that fits, else
    the one that lacks least.
    """

    room: int
    chosen: Layout | None
    memory: Mapping[Layout, Training]
    need: Mapping[Layout, int]
    cost: Mapping[Layout, float]
    illegal: Mapping[Layout, list[str]]

    @property
    def fits(self) -> bool:
        return self.chosen is not None and self.need[self.chosen] <= self.room


def explain(
    shape: ModelShape,
    cluster: ClusterShape,
    constraints: PlanConstraints,
    search: Search,
    sglang: SglangArguments,
) -> tuple[str, ...]:
    """One sentence for each decision, "subject: reason"."""
    layout = search.chosen
    assert layout is not None
    return (
        _model(shape),
        *(_size(name, constraints, search, layout) for name in ("tp", "pp", "cp")),
        *(
            [_size("ep", constraints, search, layout), _etp(constraints, layout)]
            if shape.experts
            else []
        ),
        _dp(constraints, layout),
        _sequence_parallel(shape, constraints, layout),
        _recompute(constraints, search, layout),
        _microbatch(constraints, layout),
        *_stages(shape, layout),
        *_vocabulary(shape, layout),
        _optimizer(shape, layout),
        *_trained(shape, constraints),
        *_rollout(shape, constraints, cluster, sglang),
    )


def _model(shape: ModelShape) -> str:
    notes = [ROWS[shape.architecture].note]
    if shape.quantization:
        notes.append(f"its {shape.quantization} weights are loaded as bfloat16")
    if shape.draft_layers:
        notes.append(f"{shape.draft_layers} multi-token-prediction layer(s) left out")
    return f"{shape.architecture}: {'; '.join(notes)}"


def _size(name: str, constraints: PlanConstraints, search: Search, layout: Layout) -> str:
    """A parallel size against the best layout that does without it."""
    size = getattr(layout, name)
    if getattr(constraints, name) is not None:
        return f"{name} {size}: as asked for"
    if size == 1:
        return f"{name} 1: not needed"
    less = [other for other in search.memory if getattr(other, name) < size]
    return f"{name} {size}: {_without(search, layout, less)}"


def _without(search: Search, layout: Layout, others: list[Layout]) -> str:
    fitting = [other for other in others if search.need[other] <= search.room]
    if fitting:
        cheapest = min(search.cost[other] for other in fitting)
        more = cheapest / search.cost[layout] - 1
        return f"less would take {100 * more:.0f} % longer by the planner's rules"
    if others:
        least = min(search.need[other] for other in others)
        return f"with less a rank needs {_gib(least)} at least, and has {_gib(search.room)}"
    return "nothing less is legal on this number of GPUs"


def _etp(constraints: PlanConstraints, layout: Layout) -> str:
    why = (
        "as asked for"
        if constraints.etp is not None
        else "whole experts compute faster than cut ones"
    )
    return f"etp {layout.etp}: {why}; each expert lies on {layout.expert_dp} rank(s)"


def _dp(constraints: PlanConstraints, layout: Layout) -> str:
    why = "as asked for" if constraints.dp is not None else "the GPUs that are left"
    return f"dp {layout.dp}: {why}"


def _sequence_parallel(shape: ModelShape, constraints: PlanConstraints, layout: Layout) -> str:
    if constraints.sequence_parallel is not None:
        why = "as asked for"
    elif layout.tp == 1:
        why = "it needs tp above 1"
    else:
        why = "cuts the activations that tp leaves whole, at no cost"
    return f"sequence parallelism {'on' if layout.sequence_parallel else 'off'}: {why}"


def _recompute(constraints: PlanConstraints, search: Search, layout: Layout) -> str:
    if constraints.recompute is not None:
        why = "as asked for"
    elif layout.recompute == "none":
        why = "activations fit as they are"
    else:
        why = _without(search, layout, [o for o in search.memory if o.recompute == "none"])
    return f"recompute {layout.recompute}: {why}"


def _microbatch(constraints: PlanConstraints, layout: Layout) -> str:
    why = "one sequence of the longest kind; shorter ones are packed"
    if constraints.microbatch_tokens is not None:
        why = "as asked for"
    return f"micro-batches of {layout.microbatch_tokens} tokens: {why}"


def _stages(shape: ModelShape, layout: Layout) -> Iterator[str]:
    if shape.layers % layout.pp:
        sizes = [stage.dense + stage.experts for stage in stages(shape, layout.pp)]
        yield (
            f"stages of {sizes[0]} layers, {sizes[-1]} in the last: {shape.layers} do not divide "
            f"by {layout.pp}, and the last has the output layer to compute"
        )


def _vocabulary(shape: ModelShape, layout: Layout) -> Iterator[str]:
    added = padded_vocab(shape, layout.tp) - shape.vocab_size
    if added:
        yield (
            f"vocabulary {padded_vocab(shape, layout.tp)}: {added} row(s) of padding, masked in "
            f"the softmax, as {shape.vocab_size} does not divide by tp {layout.tp}"
        )


def _optimizer(shape: ModelShape, layout: Layout) -> str:
    shares = f"{layout.dp * layout.cp} rank(s)"
    if shape.experts:
        shares += f", that of experts over {layout.expert_dp}"
    return f"distributed optimizer: its state is shared out over {shares}"


def _trained(shape: ModelShape, constraints: PlanConstraints) -> Iterator[str]:
    if constraints.lora_rank is not None and shape.experts:
        yield (
            f"adapters of experts have rank {expert_rank(shape, constraints.lora_rank)}: "
            f"{constraints.lora_rank} divided by the {shape.experts.top_k} experts a token meets"
        )


def _rollout(
    shape: ModelShape, constraints: PlanConstraints, cluster: ClusterShape, sglang: SglangArguments
) -> Iterator[str]:
    where = "apart from training" if constraints.rollout_gpus else "on the GPUs that train, in turn"
    nodes = f", over {sglang.nnodes} nodes" if sglang.nnodes > 1 else ""
    yield (
        f"engines of {sglang.tp_size} GPU(s){nodes}, {where}: the smallest with room for weights "
        "and cache"
    )
    yield (
        f"memory fraction {sglang.mem_fraction_static:.2f}: of {_gib(cluster.gpu_memory_bytes)} "
        "less margin, processes, activations and CUDA graphs"
    )
    yield (
        f"at most {sglang.max_running_requests} requests at a time in an engine: "
        f"{CONCURRENCY} times what fits at full length, 256 at most"
    )
    if constraints.lora_rank is not None:
        how = "as adapters" if sglang.enable_lora else "merged: engines take no adapters of experts"
        yield f"new weights reach the engines {how}"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
