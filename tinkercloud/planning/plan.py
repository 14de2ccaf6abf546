"""What is decided before anything starts: how a model lies on GPUs, and the engines' arguments.

Everything here is frozen and free of engines: the API process makes plans, `cluster` carries them
out. Sizes: tp tensor, pp pipeline, cp context, ep expert, etp expert tensor, dp data parallel.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

GIB = 1024**3

Recompute = Literal["none", "full"]
Dtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """gpus: all that this model may use; in whole nodes when more than one node's."""

    gpus: int
    gpus_per_node: int = 8
    gpu_memory_bytes: int = 80 * GIB


@dataclass(frozen=True, slots=True)
class PlanConstraints:
    """What the user fixes; None is left to the planner.

    lora_rank None: full-parameter training, else the largest adapter rank to be served.
    rollout_gpus 0: sampling and training take turns on the same GPUs (colocated).
    """

    lora_rank: int | None = 32
    max_seq_len: int | None = None
    rollout_gpus: int = 0
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    etp: int | None = None
    dp: int | None = None
    sequence_parallel: bool | None = None
    recompute: Recompute | None = None
    microbatch_tokens: int | None = None
    rollout_tp: int | None = None  # GPUs per sampling engine
    dtype: Dtype = "bfloat16"


@dataclass(frozen=True, slots=True)
class Layout:
    """How training lies on the ranks. microbatch_tokens: packed tokens of one micro-batch."""

    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    dp: int
    sequence_parallel: bool
    recompute: Recompute
    microbatch_tokens: int

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same expert."""
        return max(1, self.tp * self.cp * self.dp // (self.ep * self.etp))


@dataclass(frozen=True, slots=True)
class RolloutLayout:
    """engines x tp GPUs sample. kv_tokens: what one engine's cache holds."""

    engines: int
    tp: int
    colocated: bool
    mem_fraction_static: float
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class MegatronArguments:
    """By Megatron-core 0.16's names (TransformerConfig, GPTModel, parallel_state), besides
    vocab_size (the network's own) and dtype."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    layernorm_epsilon: float
    add_qkv_bias: bool
    qk_layernorm: bool
    vocab_size: int
    padded_vocab_size: int
    max_sequence_length: int
    untie_embeddings_and_output_weights: bool
    rotary_base: float
    rotary_percent: float = 1.0
    rope_scaling: bool = False  # llama3's, with low 1, high 4, original length 8192
    rope_scaling_factor: float = 8.0
    seq_len_interpolation_factor: float | None = None
    dtype: Dtype = "bfloat16"
    # layout
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    num_layers_in_last_pipeline_stage: int | None = None
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = None
    # experts
    num_moe_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_router_topk: int = 2
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_topk_scaling_factor: float | None = None
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_layer_freq: tuple[int, ...] = ()  # one entry per layer, 1: experts, 0: dense
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    moe_grouped_gemm: bool = False
    # multi-head latent attention
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_head_dim: int | None = None
    qk_pos_emb_head_dim: int | None = None
    v_head_dim: int | None = None
    rope_type: Literal["rope", "yarn"] = "rope"
    rotary_scaling_factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


@dataclass(frozen=True, slots=True)
class SglangArguments:
    """By the names of SGLang 0.5.23's server options."""

    tp_size: int
    nnodes: int
    mem_fraction_static: float
    context_length: int
    max_running_requests: int
    enable_memory_saver: bool
    enable_weights_cpu_backup: bool
    enable_lora: bool
    max_lora_rank: int | None
    max_loras_per_batch: int | None
    lora_target_modules: tuple[str, ...]
    dtype: Dtype = "bfloat16"


@dataclass(frozen=True, slots=True)
class MemoryPhase:
    """Bytes on the fullest GPU while this phase lasts, by what holds them, in print order."""

    name: str
    parts: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        return sum(size for _, size in self.parts)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that starting and running a model on a cluster needs to know.

    trained_parameters: those that get gradients. expert_lora_rank: rank of the adapters of experts
    (None without). reasons: one sentence for each decision, "subject: reason".
    """

    architecture: str
    parameters: int
    active_parameters: int
    trained_parameters: int
    cluster: ClusterShape
    layout: Layout
    rollout: RolloutLayout
    lora_rank: int | None
    expert_lora_rank: int | None
    max_seq_len: int
    logits_chunk_tokens: int
    distributed_optimizer: bool
    usable_bytes: int
    phases: tuple[MemoryPhase, ...]
    megatron: MegatronArguments
    sglang: SglangArguments
    reasons: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """For snapshots and `tinkercloud plan --json`."""
        from dataclasses import asdict

        return asdict(self)
