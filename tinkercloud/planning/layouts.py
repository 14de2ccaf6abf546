"""Which layouts are legal, and what they cost in time: what the search of a plan compares.

The cost is the time of a step over that of the same GPUs working alone, by rules of thumb (the
`_COST` figures), and orders layouts; it predicts nothing. docs/planning.md explains the figures.
"""

from collections.abc import Iterator
from itertools import product
from math import log2

from tinkercloud.planning.memory_estimate import last_stage_layers
from tinkercloud.planning.model_shape import ModelShape
from tinkercloud.planning.plan import ClusterShape, Layout, PlanConstraints, Recompute

TP_COST = 0.05  # for each doubling of tp: all-reduces that nothing hides
CP_COST = 0.06  # for each doubling of cp: keys and values on a ring
EP_COST = 0.04  # for each doubling of ep: two all-to-alls a layer
AWAY_COST = 0.10  # more for each doubling of cp or ep that leaves the node
PP_MICROBATCHES = 16  # a replica's micro-batches in a step, which fill the pipeline
LEAST_CP_TOKENS = 2048  # a smaller share of a sequence computes less than it sends


def training_gpus(cluster: ClusterShape, constraints: PlanConstraints) -> int:
    return cluster.gpus - constraints.rollout_gpus


def candidates(
    shape: ModelShape, cluster: ClusterShape, constraints: PlanConstraints, max_seq_len: int
) -> Iterator[Layout]:
    """Every layout the constraints leave open, legal or not, in a fixed order."""
    gpus = training_gpus(cluster, constraints)
    tps = _constrained(constraints.tp, [d for d in divisors(gpus) if d <= cluster.gpus_per_node])
    pps = _constrained(constraints.pp, [d for d in divisors(gpus) if d <= shape.layers])
    cps = _constrained(constraints.cp, _context_sizes(gpus, max_seq_len))
    eps = _constrained(constraints.ep, divisors(shape.experts.count) if shape.experts else [1])
    recomputes: list[Recompute] = (
        [constraints.recompute] if constraints.recompute else ["none", "full"]
    )
    etp = 1 if constraints.etp is None else constraints.etp
    for tp, pp, cp, ep in product(tps, pps, cps, eps):
        if constraints.ep is None and ep > max(1, gpus // pp):
            continue
        for recompute in recomputes:
            yield _layout(constraints, gpus, max_seq_len, (tp, pp, cp, ep, etp), recompute)


def _layout(
    constraints: PlanConstraints,
    gpus: int,
    max_seq_len: int,
    sizes: tuple[int, int, int, int, int],
    recompute: Recompute,
) -> Layout:
    tp, pp, cp, ep, etp = sizes
    spread = tp > 1 if constraints.sequence_parallel is None else constraints.sequence_parallel
    tokens = constraints.microbatch_tokens
    if tokens is None:
        unit = _token_unit(tp, cp)
        tokens = -(-max_seq_len // unit) * unit
    dp = constraints.dp if constraints.dp is not None else max(1, gpus // (tp * pp * cp))
    return Layout(tp, pp, cp, ep, etp, dp, spread, recompute, tokens)


def _constrained(value: int | None, otherwise: list[int]) -> list[int]:
    return otherwise if value is None else [value]


def _context_sizes(gpus: int, max_seq_len: int) -> list[int]:
    sizes = [1]
    while gpus % (2 * sizes[-1]) == 0 and max_seq_len // (2 * sizes[-1]) >= LEAST_CP_TOKENS:
        sizes.append(2 * sizes[-1])
    return sizes


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _token_unit(tp: int, cp: int) -> int:
    """A micro-batch is cut into 2 cp pieces (a zig-zag balances causal attention), each by tp."""
    return tp * (2 * cp if cp > 1 else 1)


def faults(
    shape: ModelShape,
    cluster: ClusterShape,
    constraints: PlanConstraints,
    layout: Layout,
    max_seq_len: int,
) -> list[str]:
    """Every reason why a layout is impossible; empty where it is legal."""
    gpus = training_gpus(cluster, constraints)
    reasons = [*_size_faults(layout, cluster, gpus), *_tensor_faults(shape, layout)]
    reasons += _expert_faults(shape, layout) if not reasons or layout.ep * layout.etp > 1 else []
    if layout.pp > 1 and last_stage_layers(shape.layers, layout.pp) < 1:
        reasons.append(f"pp {layout.pp} cannot cut {shape.layers} layers into stages")
    unit = _token_unit(layout.tp, layout.cp)
    if layout.microbatch_tokens % unit:
        reasons.append(
            f"micro-batches of {layout.microbatch_tokens} tokens do not divide by {unit}, "
            f"as tp {layout.tp} and cp {layout.cp} need"
        )
    if layout.microbatch_tokens < max_seq_len:
        reasons.append(
            f"micro-batches of {layout.microbatch_tokens} tokens cannot hold a sequence of "
            f"{max_seq_len}; sequences are not cut"
        )
    return reasons


def _size_faults(layout: Layout, cluster: ClusterShape, gpus: int) -> Iterator[str]:
    if layout.world != gpus:
        yield (
            f"tp {layout.tp} x pp {layout.pp} x cp {layout.cp} x dp {layout.dp} is "
            f"{layout.world}, not the {gpus} GPUs that train"
        )
    if layout.tp > cluster.gpus_per_node:
        yield f"tp {layout.tp} leaves the node of {cluster.gpus_per_node} GPUs"
    elif cluster.gpus_per_node % layout.tp and gpus > cluster.gpus_per_node:
        yield f"tp {layout.tp} does not divide the {cluster.gpus_per_node} GPUs of a node"
    if layout.sequence_parallel and layout.tp == 1:
        yield "sequence parallelism needs tp above 1"


def _tensor_faults(shape: ModelShape, layout: Layout) -> Iterator[str]:
    cut = {"attention heads": shape.heads}
    if shape.latent is None:
        cut["key/value heads"] = shape.kv_heads
    if not all(shape.expert_layers):
        cut["intermediate size"] = shape.ffn
    if shape.experts and shape.experts.shared_ffn:
        cut["intermediate size of the shared experts"] = shape.experts.shared_ffn
    for name, size in cut.items():
        if size % layout.tp:
            yield f"tp {layout.tp} does not divide {size} ({name})"


def _expert_faults(shape: ModelShape, layout: Layout) -> Iterator[str]:
    experts = shape.experts
    if experts is None:
        if layout.ep * layout.etp > 1:
            yield f"ep {layout.ep} and etp {layout.etp}: {shape.architecture} has no experts"
        return
    if experts.count % layout.ep:
        yield f"ep {layout.ep} does not divide {experts.count} experts"
    if experts.ffn % layout.etp:
        yield f"etp {layout.etp} does not divide {experts.ffn} (intermediate size of an expert)"
    ranks = layout.tp * layout.cp * layout.dp
    if ranks % (layout.ep * layout.etp):
        yield (
            f"ep {layout.ep} x etp {layout.etp} does not divide the {ranks} GPUs "
            "of a pipeline stage"
        )
    if layout.tp > 1 and not layout.sequence_parallel:
        yield "experts with tp above 1 need sequence parallelism"


def cost(shape: ModelShape, cluster: ClusterShape, layout: Layout, *, lora: bool) -> float:
    """Relative time of a step; 1.0 is no parallelism but data parallelism, nothing recomputed."""
    node = cluster.gpus_per_node
    compute = 1.0
    if layout.recompute == "full":
        # Forward again: a third more than forward and two backward products, half more than
        # forward and one, which is what frozen weights take.
        compute += 1 / 2 if lora else 1 / 3
    stage = -(-shape.layers // layout.pp)
    compute *= stage * layout.pp / shape.layers  # the others wait for the fullest stage
    compute *= 1 + (layout.pp - 1) / PP_MICROBATCHES
    talk = TP_COST * log2(layout.tp)
    talk += _network(CP_COST, layout.cp, max(1, node // layout.tp))
    talk += _network(EP_COST, layout.ep, max(1, node // layout.etp))
    return compute * (1 + talk)


def _network(each: float, size: int, near: int) -> float:
    """near: how many members of the group one node holds."""
    away = max(0.0, log2(size / near))
    return each * log2(size) + AWAY_COST * away
