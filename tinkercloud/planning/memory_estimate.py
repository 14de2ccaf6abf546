"""Bytes on the fullest rank, phase by phase. docs/planning.md derives every formula.

Sizes: e bytes of an element (2 for bfloat16), tp, pp, cp, ep, etp, dp of the layout. What is saved
for the backward pass is counted tensor by tensor for flash attention and a gated MLP, in the way of
Korthikanti et al. (arXiv:2205.05198, section 4); the optimizer's state follows ZeRO stage 1
(Rajbhandari et al., arXiv:1910.02054, section 5).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from tinkercloud.core.types import DTYPE_BYTES, AdapterSizes
from tinkercloud.planning.model_shape import Linear, ModelShape
from tinkercloud.planning.plan import GIB, ClusterShape, Layout, MemoryPhase

MIB = 1024**2
MARGIN = 0.06  # of a GPU: fragmentation, NCCL's buffers, what the driver keeps
PROCESS_BYTES = GIB  # a CUDA context with its kernels, and the communicators
LOGITS_CHUNK_TOKENS = 1024  # rows of logits that exist at a time
LOGITS_ELEMENT_BYTES = 12  # logits, their float32 copy, its gradient: 2 + 4 + 4, and the exponent's
EXPERT_IMBALANCE = 1.5  # tokens of the busiest rank over the mean
RESIDENT_ADAPTERS = 4  # models whose adapters stay on the GPU; those of others wait on the host
SYNC_BUCKET_BYTES = GIB  # whole tensors on their way to the engines
GRAPH_BYTES = 512 * MIB


@dataclass(frozen=True, slots=True)
class Training:
    """What a rank holds while it trains, in bytes. adapters: LoRA's weights, gradients, moments."""

    weights: int
    gradients: int
    optimizer: int
    adapters: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.adapters + self.activations

    @property
    def syncing(self) -> int:
        """While weights are sent to the engines; the optimizer's state waits on the host."""
        return self.weights + self.adapters + SYNC_BUCKET_BYTES


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers of one pipeline stage: its place, dense layers, layers with experts."""

    index: int
    dense: int
    experts: int


def stages(shape: ModelShape, pp: int) -> list[Stage]:
    """Equal stages, and a last one with what is left."""
    each = -(-shape.layers // pp)
    kinds = [shape.expert_layers[i * each : (i + 1) * each] for i in range(pp)]
    return [Stage(i, kind.count(False), kind.count(True)) for i, kind in enumerate(kinds)]


def last_stage_layers(layers: int, pp: int) -> int:
    """May be below 1: then this pp is not legal."""
    return layers - -(-layers // pp) * (pp - 1)


def padded_vocab(shape: ModelShape, tp: int) -> int:
    return -(-shape.vocab_size // tp) * tp


def expert_rank(shape: ModelShape, lora_rank: int) -> int:
    """Adapters of experts share the rank among the experts that a token meets."""
    assert shape.experts is not None
    return max(1, lora_rank // shape.experts.top_k)


def usable_bytes(cluster: ClusterShape) -> int:
    return int(cluster.gpu_memory_bytes * (1 - MARGIN))


def processes_bytes(colocated: bool) -> int:
    """CUDA contexts on a GPU: the trainer's, and an engine's where they share it."""
    return 2 * PROCESS_BYTES if colocated else PROCESS_BYTES


def engine_bytes(cluster: ClusterShape) -> int:
    """An engine's activations and CUDA graphs: 1.5 MB for each token of a prefill chunk, which
    SGLang sizes by the GPU's memory, and the graphs of decoding."""
    memory = cluster.gpu_memory_bytes // GIB
    tokens = 2048 if memory < 35 else 4096 if memory < 60 else 8192
    return 512 * MIB + 3 * MIB * tokens // 2 + GRAPH_BYTES


def training(
    shape: ModelShape, layout: Layout, lora_rank: int | None, dtype: str = "bfloat16"
) -> Training:
    """Of the pipeline stage that holds most."""
    # Of equal stages the first has most micro-batches under way; the last has the output layer.
    kinds: dict[tuple[int, int, bool], Stage] = {}
    for stage in stages(shape, layout.pp):
        kinds.setdefault((stage.dense, stage.experts, stage.index == layout.pp - 1), stage)
    estimates = [_stage(shape, layout, lora_rank, dtype, stage) for stage in kinds.values()]
    return max(estimates, key=lambda estimate: estimate.total)


def _stage(
    shape: ModelShape, layout: Layout, lora_rank: int | None, dtype: str, stage: Stage
) -> Training:
    size = DTYPE_BYTES[dtype]
    dense, experts = stage_parameters(shape, layout, stage)
    gradients = optimizer = adapters = 0
    if lora_rank is None:
        gradients = 4 * (dense + experts)
        # float32 weights are their own main copy.
        state = 8 if dtype == "float32" else 12
        optimizer = _shared(state, layout, dense, experts)
    else:
        of_dense, of_experts = stage_adapters(shape, layout, lora_rank, stage)
        each = 8 * (of_dense + of_experts) + _shared(8, layout, of_dense, of_experts)
        adapters = RESIDENT_ADAPTERS * each + 4 * (of_dense + of_experts)
    return Training(
        weights=size * (dense + experts),
        gradients=gradients,
        optimizer=optimizer,
        adapters=adapters,
        activations=_activations(shape, layout, size, stage),
    )


def _shared(size: int, layout: Layout, dense: int, experts: int) -> int:
    """The distributed optimizer's part: shared out over the ranks with the same weights."""
    return size * -(-dense // (layout.dp * layout.cp)) + size * -(-experts // layout.expert_dp)


def stage_parameters(shape: ModelShape, layout: Layout, stage: Stage) -> tuple[int, int]:
    """(all but experts, experts) on one rank of a stage, with the vocabulary's padding."""
    dense = experts = 0
    for kind, layers in ((False, stage.dense), (True, stage.experts)):
        if not layers:
            continue
        of_dense, of_experts = _layer_parameters(shape, kind, layout.tp, layout.ep, layout.etp)
        dense, experts = dense + layers * of_dense, experts + layers * of_experts
    table = padded_vocab(shape, layout.tp) // layout.tp * shape.hidden
    first, last = stage.index == 0, stage.index == layout.pp - 1
    # A tied table on both ends of a pipeline lies on both.
    tables = 1 if first and last and shape.tied else first + last
    return dense + tables * table + (shape.hidden if last else 0), experts


@lru_cache(maxsize=1024)  # a search asks for the same few again and again
def _layer_parameters(shape: ModelShape, kind: bool, tp: int, ep: int, etp: int) -> tuple[int, int]:
    linears = shape.linears(kind)
    experts = sum(linear.rank_parameters(etp, ep) for linear in linears if linear.expert)
    dense = sum(linear.rank_parameters(tp, ep) for linear in linears if not linear.expert)
    return dense + shape.vectors(kind), experts


def stage_adapters(
    shape: ModelShape, layout: Layout, lora_rank: int, stage: Stage
) -> tuple[int, int]:
    """(all but experts', experts') adapter parameters on one rank of a stage."""
    dense = experts = 0
    for kind, layers in ((False, stage.dense), (True, stage.experts)):
        if layers:
            of_dense, of_experts = _layer_adapters(
                shape, kind, lora_rank, layout.tp, layout.ep, layout.etp
            )
            dense, experts = dense + layers * of_dense, experts + layers * of_experts
    if stage.index == layout.pp - 1:
        head = shape.head(padded_vocab(shape, layout.tp))
        dense += head.rank_adapter(lora_rank, layout.tp, layout.ep)
    return dense, experts


@lru_cache(maxsize=1024)
def _layer_adapters(  # noqa: PLR0913 - the key of a cache
    shape: ModelShape, kind: bool, lora_rank: int, tp: int, ep: int, etp: int
) -> tuple[int, int]:
    dense = experts = 0
    for linear in shape.linears(kind):
        if linear.adapted and linear.expert:
            experts += linear.rank_adapter(expert_rank(shape, lora_rank), etp, ep)
        elif linear.adapted:
            dense += linear.rank_adapter(lora_rank, tp, ep)
    return dense, experts


def adapter_sizes(shape: ModelShape) -> AdapterSizes:
    """Of the whole network, without the vocabulary's padding."""
    attention = mlp = experts = 0
    for has_experts in shape.expert_layers:
        attention += _of_rank_1(shape.attention())
        mlps = shape.mlp(has_experts)
        mlp += _of_rank_1(linear for linear in mlps if not linear.expert)
        experts += _of_rank_1(linear for linear in mlps if linear.expert)
    head = _of_rank_1([shape.head(shape.vocab_size)])
    top_k = shape.experts.top_k if shape.experts else 1
    return AdapterSizes(attention, mlp, head, experts, top_k)


def _of_rank_1(linears: Iterable[Linear]) -> int:
    return sum(linear.rank_adapter(1, 1, 1) for linear in linears if linear.adapted)


def _activations(shape: ModelShape, layout: Layout, size: int, stage: Stage) -> int:
    """At 1F1B's peak: pp - index micro-batches are under way in a stage."""
    tokens = layout.microbatch_tokens // layout.cp
    flying = layout.pp - stage.index
    spread = layout.tp if layout.sequence_parallel else 1
    border = tokens * shape.hidden // spread  # a layer's input
    dense = _layer(shape, layout, tokens, experts=False) if stage.dense else 0
    experts = _layer(shape, layout, tokens, experts=True) if stage.experts else 0
    if layout.recompute == "full":
        kept = flying * (stage.dense + stage.experts) * border
        held = kept + max(dense, experts)  # one layer at a time is computed again
    else:
        held = flying * (stage.dense * dense + stage.experts * experts)
    held += 2 * border  # the stage's input and output on their way
    rows = min(tokens, LOGITS_CHUNK_TOKENS)
    logits = LOGITS_ELEMENT_BYTES * rows * padded_vocab(shape, layout.tp) // layout.tp
    last = stage.index == layout.pp - 1
    return size * held + (logits if last else 0)


def _layer(shape: ModelShape, layout: Layout, tokens: int, *, experts: bool) -> int:
    """Elements that one layer saves for the backward pass, on one rank."""
    spread = layout.tp if layout.sequence_parallel else 1
    # Inputs of both norms and what comes out of them.
    whole = 4 * shape.hidden
    held = tokens * whole // spread + tokens * _attention(shape) // layout.tp
    if not experts or shape.experts is None:
        return held + 3 * tokens * shape.ffn // layout.tp
    moe = shape.experts
    held += 3 * tokens * moe.shared_ffn // layout.tp
    # Tokens sent to experts and back, gate and up, their product. Tensor parallelism spreads the
    # tokens over ranks (sequence parallel), expert tensor parallelism gathers them again.
    routed = tokens * moe.top_k * layout.etp // layout.tp
    each = 2 * shape.hidden + 3 * moe.ffn // layout.etp
    return held + int(EXPERT_IMBALANCE * routed * each)


def _attention(shape: ModelShape) -> int:
    """Elements for each token: query and key before and after rotation, value, output."""
    if shape.latent is None:
        return (3 * shape.heads + 3 * shape.kv_heads) * shape.head_dim
    latent = shape.latent
    key = latent.qk_nope_head_dim + latent.qk_rope_head_dim
    small = 2 * ((latent.q_lora_rank or 0) + latent.kv_lora_rank + latent.qk_rope_head_dim)
    return shape.heads * (4 * key + 2 * latent.v_head_dim) + small


def rollout_weights(shape: ModelShape, tp: int, dtype: str = "bfloat16") -> int:
    """On one GPU of an engine, experts cut like everything else."""
    count = 0
    for kind in (False, True):
        layers = shape.expert_layers.count(kind)
        if layers:
            each = sum(linear.rank_parameters(tp, 1) for linear in _served(shape, kind, tp))
            count += layers * (each + shape.vectors(kind))
    tables = 1 if shape.tied else 2
    count += tables * (padded_vocab(shape, tp) // tp) * shape.hidden + shape.hidden
    return DTYPE_BYTES[dtype] * count


def _served(shape: ModelShape, experts: bool, tp: int) -> list[Linear]:
    """Linears with key/value heads repeated where there are fewer of them than GPUs."""
    repeats = max(1, tp // shape.kv_heads) if shape.latent is None else 1
    return [
        replace(linear, out_size=linear.out_size * repeats)
        if linear.name in ("k_proj", "v_proj")
        else linear
        for linear in shape.linears(experts)
    ]


def rollout_adapters(shape: ModelShape, tp: int, lora_rank: int, dtype: str = "bfloat16") -> int:
    """One adapter on one GPU of an engine."""
    count = shape.head(padded_vocab(shape, tp)).rank_adapter(lora_rank, tp, 1)
    for kind in (False, True):
        layers = shape.expert_layers.count(kind)
        for linear in shape.linears(kind) if layers else ():
            count += layers * linear.rank_adapter(lora_rank, tp, 1) if linear.adapted else 0
    return DTYPE_BYTES[dtype] * count


def kv_token_bytes(shape: ModelShape, tp: int, dtype: str = "bfloat16") -> int:
    """Keys and values of one token on one GPU; latent attention keeps its compressed form whole."""
    if shape.latent:
        each = shape.latent.kv_lora_rank + shape.latent.qk_rope_head_dim
    else:
        each = 2 * -(-shape.kv_heads // tp) * shape.head_dim
    return DTYPE_BYTES[dtype] * shape.layers * each


def training_phase(held: Training, *, colocated: bool) -> MemoryPhase:
    return MemoryPhase(
        "training",
        (
            ("weights", held.weights),
            ("gradients", held.gradients),
            ("optimizer", held.optimizer),
            ("adapters", held.adapters),
            ("activations", held.activations),
            ("processes", processes_bytes(colocated)),
        ),
    )


def sync_phase(held: Training, rollout: int, *, colocated: bool) -> MemoryPhase:
    """Weights of trainer and engine at once, with a bucket; the optimizer's state is on the host.

    The engine's cache and graphs come afterwards. Apart, the fuller side counts: the trainer's.
    """
    return MemoryPhase(
        "sync",
        (
            ("weights", held.weights),
            ("adapters", held.adapters),
            ("bucket", SYNC_BUCKET_BYTES),
            ("engine weights", rollout if colocated else 0),
            ("processes", processes_bytes(colocated)),
        ),
    )


def sampling_phase(
    cluster: ClusterShape, weights: int, adapters: int, cache: int, *, colocated: bool
) -> MemoryPhase:
    """The trainer holds nothing on the GPU but its context."""
    return MemoryPhase(
        "sampling",
        (
            ("engine weights", weights),
            ("adapters", adapters),
            ("cache", cache),
            ("activations and graphs", engine_bytes(cluster)),
            ("processes", processes_bytes(colocated)),
        ),
    )
