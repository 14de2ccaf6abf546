"""A network by its sizes: what a plan counts with. Pure arithmetic on the figures of a config.

A linear is (out, in), as Hugging Face stores it. "column" linears are cut along out, "row" ones
along in, by tensor parallelism; "whole" ones lie on every rank as they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Cut = Literal["column", "row", "whole"]
Score = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Linear:
    """`count` equal linears: 1, or one for each expert. adapted: whether LoRA sits on it."""

    name: str
    out_size: int
    in_size: int
    cut: Cut = "column"
    bias: bool = False
    adapted: bool = True
    expert: bool = False
    count: int = 1

    @property
    def parameters(self) -> int:
        return self.count * (self.out_size * self.in_size + self.bias * self.out_size)

    def rank_parameters(self, tp: int, ep: int) -> int:
        """On one rank, cut by tp (for experts: etp); ep shares out the experts."""
        count = self.count // ep if self.expert else self.count
        parts = 1 if self.cut == "whole" else tp
        bias = self.bias * self.out_size // (tp if self.cut == "column" else 1)
        return count * (self.out_size * self.in_size // parts + bias)

    def rank_adapter(self, rank: int, tp: int, ep: int) -> int:
        """Parameters of LoRA's A (rank, in) and B (out, rank) on one rank: one of them is cut."""
        count = self.count // ep if self.expert else self.count
        rows = self.out_size // (tp if self.cut == "column" else 1)
        columns = self.in_size // (tp if self.cut == "row" else 1)
        return count * rank * (rows + columns)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. kind: Hugging Face's rope_type. percent: the share of a head rotated."""

    base: float
    kind: str = "default"
    percent: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, slots=True)
class Experts:
    """One layer of experts. ffn: intermediate size of each; shared_ffn: of those always used.

    score_correction: a bias per expert that only chooses (DeepSeek's balancing without a loss).
    normalised: whether the chosen experts' weights sum to 1 (before scaling_factor).
    """

    count: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    score: Score = "softmax"
    normalised: bool = True
    scaling_factor: float | None = None
    groups: int | None = None
    group_top_k: int | None = None
    score_correction: bool = False
    router_bias: bool = False
    biases: bool = False

    @property
    def pre_softmax(self) -> bool:
        """Softmax over all experts, not renormalised over the chosen."""
        return self.score == "softmax" and not self.normalised


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, section 2.1)."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One decoder. expert_layers: for each layer, whether its MLP is made of experts.

    window: positions that a layer of sliding-window attention sees, None where none does.
    layer_norms: norms of hidden size in a layer. draft_layers: multi-token-prediction layers in the
    checkpoint, which are neither counted nor loaded. oddities: what reading the config met that
    training cannot do.
    """

    architecture: str
    vocab_size: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    tied: bool
    rope: Rope
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    layer_norms: int = 2
    window: int | None = None
    experts: Experts | None = None
    expert_layers: tuple[bool, ...] = ()
    latent: Latent | None = None
    quantization: str | None = None
    activation: str = "silu"
    draft_layers: int = 0
    oddities: tuple[str, ...] = ()

    @property
    def v_head_dim(self) -> int:
        return self.latent.v_head_dim if self.latent else self.head_dim

    def head(self, rows: int) -> Linear:
        """The output layer with a vocabulary of `rows`."""
        return Linear("lm_head", rows, self.hidden)

    def linears(self, experts: bool) -> tuple[Linear, ...]:
        """Those of one layer, with experts or dense."""
        return (*self.attention(), *self.mlp(experts))

    def mlp(self, experts: bool) -> tuple[Linear, ...]:
        return tuple(self._moe() if experts else self._mlp())

    def attention(self) -> Iterator[Linear]:
        if self.latent:
            yield from self._latent_attention(self.latent)
            return
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for name, size in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield Linear(name, size, self.hidden, bias=self.qkv_bias)
        yield Linear("o_proj", self.hidden, q, "row", bias=self.output_bias)

    def _latent_attention(self, latent: Latent) -> Iterator[Linear]:
        query = self.heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
        if latent.q_lora_rank is None:
            yield Linear("q_proj", query, self.hidden)
        else:
            yield Linear("q_a_proj", latent.q_lora_rank, self.hidden, "whole", adapted=False)
            yield Linear("q_b_proj", query, latent.q_lora_rank, adapted=False)
        rank, keys = latent.kv_lora_rank, latent.kv_lora_rank + latent.qk_rope_head_dim
        yield Linear("kv_a_proj_with_mqa", keys, self.hidden, "whole", adapted=False)
        both = self.heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        yield Linear("kv_b_proj", both, rank, adapted=False)
        yield Linear("o_proj", self.hidden, self.heads * latent.v_head_dim, "row")

    def _mlp(self) -> Iterator[Linear]:
        yield from _gated("mlp", self.hidden, self.ffn, bias=self.mlp_bias)

    def _moe(self) -> Iterator[Linear]:
        experts = self.experts
        assert experts is not None
        yield Linear(
            "router", experts.count, self.hidden, "whole", experts.router_bias, adapted=False
        )
        for linear in _gated("experts", self.hidden, experts.ffn, bias=experts.biases):
            yield Linear(
                linear.name,
                linear.out_size,
                linear.in_size,
                linear.cut,
                linear.bias,
                expert=True,
                count=experts.count,
            )
        if experts.shared_ffn:
            yield from _gated("shared_experts", self.hidden, experts.shared_ffn)

    def vectors(self, experts: bool) -> int:
        """Parameters of one layer outside its linears: norms, sinks, the router's correction."""
        count = self.layer_norms * self.hidden
        if self.latent:
            count += (self.latent.q_lora_rank or 0) + self.latent.kv_lora_rank
        elif self.qk_norm:
            count += 2 * self.head_dim
        count += self.heads if self.sinks else 0
        if experts and self.experts and self.experts.score_correction:
            count += self.experts.count
        return count

    @property
    def parameters(self) -> int:
        """Of the decoder with its embeddings; a tied output layer counts once."""
        return self._count(active=False)

    @property
    def active_parameters(self) -> int:
        """Those that one token meets: of the experts, the chosen and the shared."""
        return self._count(active=True)

    def _count(self, *, active: bool) -> int:
        total = self.vocab_size * self.hidden * (1 if self.tied else 2) + self.hidden
        for kind in (False, True):
            layers = self.expert_layers.count(kind)
            if layers:
                each = sum(self._counted(linear, active) for linear in self.linears(kind))
                total += layers * (each + self.vectors(kind))
        return total

    def _counted(self, linear: Linear, active: bool) -> int:
        if active and linear.expert and self.experts:
            return linear.parameters // linear.count * self.experts.top_k
        return linear.parameters


def _gated(name: str, hidden: int, ffn: int, *, bias: bool = False) -> Iterator[Linear]:
    yield Linear(f"{name}.gate_proj", ffn, hidden, bias=bias)
    yield Linear(f"{name}.up_proj", ffn, hidden, bias=bias)
    yield Linear(f"{name}.down_proj", hidden, ffn, "row", bias=bias)
