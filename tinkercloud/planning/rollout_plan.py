"""How the GPUs that sample are shared out among SGLang engines."""

from dataclasses import dataclass

from tinkercloud.planning import memory_estimate as memory
from tinkercloud.planning.engine_arguments import ADAPTER_SLOTS, serves_adapters
from tinkercloud.planning.layouts import divisors
from tinkercloud.planning.model_shape import ModelShape
from tinkercloud.planning.plan import GIB, ClusterShape, PlanConstraints, RolloutLayout

AMPLE_SEQUENCES = 8  # of full length, in an engine's cache, before tp is enough


@dataclass(frozen=True, slots=True)
class Rollout:
    """The engines, and what one GPU of them holds in bytes."""

    layout: RolloutLayout
    weights: int
    adapters: int
    cache: int


def rollout_choices(
    shape: ModelShape, cluster: ClusterShape, constraints: PlanConstraints, max_seq_len: int
) -> list[Rollout] | str:
    """The engines that would do, best first: the smallest that hold AMPLE_SEQUENCES and upwards,
    then the largest that hold one and downwards.

    Small engines first: GPUs that need not talk sample more. A text with the reason where
    none does.
    """
    gpus = constraints.rollout_gpus or cluster.gpus
    if constraints.rollout_tp is not None:
        if gpus % constraints.rollout_tp or not _legal(shape, cluster, constraints.rollout_tp):
            return _illegal(shape, gpus, constraints.rollout_tp)
        sizes = [constraints.rollout_tp]
    else:
        sizes = [tp for tp in divisors(gpus) if _legal(shape, cluster, tp)]
    rollouts = [_rollout(shape, cluster, constraints, tp) for tp in sizes]
    enough = [r for r in rollouts if r.layout.kv_tokens >= max_seq_len]
    ample = [r for r in enough if r.layout.kv_tokens >= AMPLE_SEQUENCES * max_seq_len]
    if enough:
        return ample + [rollout for rollout in reversed(enough) if rollout not in ample]
    largest = rollouts[-1]
    return (
        f"sampling: an engine of {largest.layout.tp} of the {gpus} GPUs that sample has "
        f"{largest.weights / GIB:.1f} GiB of weights on each and no room for the keys and values "
        f"of one sequence of {max_seq_len} tokens"
    )


def _illegal(shape: ModelShape, gpus: int, tp: int) -> str:
    experts = f", {shape.experts.ffn} (of an expert)" if shape.experts else ""
    return (
        f"sampling: engines of {tp} GPUs (rollout tp) do not divide the {gpus} GPUs that sample, "
        f"{shape.heads} attention heads, {shape.kv_heads} key/value heads or the intermediate "
        f"size {shape.ffn}{experts}"
    )


def _legal(shape: ModelShape, cluster: ClusterShape, tp: int) -> bool:
    """SGLang cuts heads and intermediate sizes, and doubles key/value heads beyond their number."""
    node = cluster.gpus_per_node
    cut = [shape.heads]
    if not all(shape.expert_layers):
        cut.append(shape.ffn)
    if shape.experts:
        cut.append(shape.experts.ffn)
    shared = shape.latent is not None or shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0
    within = node % tp == 0 or tp % node == 0 or tp == 1
    return shared and within and all(size % tp == 0 for size in cut)


def _rollout(
    shape: ModelShape, cluster: ClusterShape, constraints: PlanConstraints, tp: int
) -> Rollout:
    colocated = constraints.rollout_gpus == 0
    fixed = memory.processes_bytes(colocated) + memory.engine_bytes(cluster)
    adapters = 0
    if constraints.lora_rank is not None and serves_adapters(shape):
        adapters = ADAPTER_SLOTS * memory.rollout_adapters(
            shape, tp, constraints.lora_rank, constraints.dtype
        )
    static = max(0, memory.usable_bytes(cluster) - fixed)
    # Rounded down to hundredths, as it is written on a command line.
    fraction = 100 * static // cluster.gpu_memory_bytes / 100
    weights = memory.rollout_weights(shape, tp, constraints.dtype)
    room = max(0, int(fraction * cluster.gpu_memory_bytes) - weights - adapters)
    each = memory.kv_token_bytes(shape, tp, constraints.dtype)
    tokens = room // each
    layout = RolloutLayout(
        engines=(constraints.rollout_gpus or cluster.gpus) // tp,
        tp=tp,
        colocated=colocated,
        mem_fraction_static=fraction,
        kv_tokens=tokens,
    )
    return Rollout(layout, weights, adapters, tokens * each)
