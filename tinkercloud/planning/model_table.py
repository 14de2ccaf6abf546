"""One row per architecture: how its config is read, and whether it can be trained.

A network that cannot be trained is still read, so that its parameters can be counted and the reason
can be given by name.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tinkercloud.errors import PlanRefused
from tinkercloud.planning.config_figures import (
    Figures,
    read_quantization,
    read_rope,
    read_window,
)
from tinkercloud.planning.model_shape import Experts, Latent, ModelShape

LOADED_QUANTIZATIONS = ("fp8",)  # by blocks, with their scales: unpacked while loading


@dataclass(frozen=True, slots=True)
class Row:
    """note: what the planner says of the network. refusals: why it cannot be trained, if so."""

    read: Callable[[Figures], ModelShape]
    note: str
    refusals: tuple[str, ...] = ()


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The network of a `config.json`. Raises PlanRefused for one that is unknown or damaged."""
    names = config.get("architectures")
    name: object = None
    if isinstance(names, list) and names:
        name = names[0]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(name, str) or name not in ROWS:
        raise PlanRefused((f"architecture {name!r} is unknown; known: {', '.join(ROWS)}",))
    figures = Figures(config)
    if figures.part("text_config") and name.endswith("ForConditionalGeneration"):
        figures = figures.part("text_config") or figures
    return ROWS[name].read(Figures({**figures.config, "architectures": [name]}, figures.where))


def untrainable(shape: ModelShape, seq_len: int) -> list[str]:
    """Every reason why this network cannot be trained on sequences of this length."""
    name = shape.architecture
    reasons = [f"{name}, {shape.parameters:,} parameters: {why}" for why in ROWS[name].refusals]
    reasons += [f"{name}: {why}" for why in (*shape.oddities, *_rope(shape), *_odd_parts(shape))]
    if shape.window is not None and seq_len > shape.window:
        reasons.append(
            f"{name}: sequences of {seq_len} tokens exceed its sliding window of {shape.window}, "
            f"and training attends to all; ask for {shape.window} at most"
        )
    return reasons


def _rope(shape: ModelShape) -> Iterable[str]:
    rope = shape.rope
    if ROWS[shape.architecture].refusals:
        return  # its positions are not the obstacle
    if rope.kind not in ("default", "linear", "llama3", "yarn"):
        yield f"rotary scaling {rope.kind!r} has no counterpart in Megatron-core"
    if rope.kind == "yarn" and shape.latent is None:
        yield "rotary scaling 'yarn' is supported with multi-head latent attention only"
    if shape.latent is not None and rope.kind not in ("default", "yarn"):
        yield f"rotary scaling {rope.kind!r} is not supported with multi-head latent attention"
    low, high = rope.low_freq_factor, rope.high_freq_factor
    length = rope.original_max_position_embeddings
    if rope.kind == "llama3" and (low, high, length) != (1.0, 4.0, 8192):
        yield (
            f"rotary scaling 'llama3' with low {low:g}, high {high:g}, original length {length}; "
            "Megatron-core has 1, 4 and 8192 built in"
        )


def _odd_parts(shape: ModelShape) -> Iterable[str]:
    if ROWS[shape.architecture].refusals:
        return
    if shape.quantization not in (None, *LOADED_QUANTIZATIONS):
        yield f"weights quantised by {shape.quantization!r}; bf16, fp16, fp32 and fp8 are read"
    if shape.output_bias:
        yield "a bias on the attention's output projection (attention_bias) is not supported"
    if shape.mlp_bias:
        yield "biases in the MLP (mlp_bias) are not supported"
    if shape.activation != "silu":
        yield f"activation {shape.activation!r}; silu is supported"


def _dense(figures: Figures, **more: Any) -> ModelShape:
    """What all decoders share; `more` overrides or adds."""
    heads, hidden = figures.count("num_attention_heads"), figures.count("hidden_size")
    layers = figures.count("num_hidden_layers")
    fields: dict[str, Any] = {
        "architecture": (figures.items("architectures") or [""])[0],
        "vocab_size": figures.count("vocab_size"),
        "hidden": hidden,
        "ffn": figures.count("intermediate_size"),
        "layers": layers,
        "heads": heads,
        "kv_heads": figures.count("num_key_value_heads", heads),
        "head_dim": figures.count("head_dim", max(1, hidden // heads)),
        "norm_eps": figures.real("rms_norm_eps", 1e-6),
        "max_positions": figures.count("max_position_embeddings", 4096),
        "tied": figures.flag("tie_word_embeddings"),
        "expert_layers": (False,) * layers,
        "quantization": read_quantization(figures),
        "activation": figures.text("hidden_act", "silu"),
    }
    if "rope" not in more:
        fields["rope"] = read_rope(figures)
    shape = ModelShape(**fields | more)
    if shape.heads % shape.kv_heads:
        raise PlanRefused(
            (f"{shape.heads} attention heads cannot share {shape.kv_heads} key/value heads",)
        )
    return shape


def _llama(figures: Figures) -> ModelShape:
    bias = figures.flag("attention_bias")
    mlp_bias = figures.flag("mlp_bias")
    return _dense(figures, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


def _mistral(figures: Figures) -> ModelShape:
    window = read_window(figures, figures.count("num_hidden_layers"))
    return _dense(figures, window=window)


def _qwen2(figures: Figures) -> ModelShape:
    return _dense(figures, qkv_bias=True, window=_qwen_window(figures))


def _qwen3(figures: Figures) -> ModelShape:
    bias = figures.flag("attention_bias")
    window = _qwen_window(figures)
    head_dim = figures.count("head_dim", 128)
    return _dense(
        figures, qkv_bias=bias, output_bias=bias, qk_norm=True, window=window, head_dim=head_dim
    )


def _qwen_window(figures: Figures) -> int | None:
    layers = figures.count("num_hidden_layers")
    return read_window(figures, layers, switch="use_sliding_window")


def _qwen3_moe(figures: Figures) -> ModelShape:
    layers, step = figures.count("num_hidden_layers"), figures.count("decoder_sparse_step", 1)
    dense = set(figures.items("mlp_only_layers") or [])
    bias = figures.flag("attention_bias")
    head_dim = figures.maybe("head_dim")
    sizes = {} if head_dim is None else {"head_dim": head_dim}
    # transformers 5 writes the second name.
    named = "num_experts" if "num_experts" in figures.config else "num_local_experts"
    return _dense(
        figures,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        window=_qwen_window(figures),
        experts=_experts(figures, named, normalised=figures.flag("norm_topk_prob")),
        expert_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        **sizes,
    )


def _mixtral(figures: Figures) -> ModelShape:
    layers = figures.count("num_hidden_layers")
    ffn = figures.count("intermediate_size")
    experts = _experts(figures, "num_local_experts", ffn=ffn)
    window = read_window(figures, layers)
    return _dense(figures, window=window, experts=experts, expert_layers=(True,) * layers)


def _deepseek(figures: Figures) -> ModelShape:
    latent = Latent(
        kv_lora_rank=figures.count("kv_lora_rank"),
        qk_nope_head_dim=figures.count("qk_nope_head_dim"),
        qk_rope_head_dim=figures.count("qk_rope_head_dim"),
        v_head_dim=figures.count("v_head_dim"),
        q_lora_rank=figures.maybe("q_lora_rank"),
    )
    odd: list[str] = []
    if not figures.flag("rope_interleave", True):
        odd.append("rope_interleave false: Megatron-core's latent attention interleaves")
    return _dense(
        figures,
        latent=latent,
        head_dim=latent.v_head_dim,
        output_bias=figures.flag("attention_bias"),
        **_sigmoid_experts(figures, odd),
    )


def _glm4_moe(figures: Figures) -> ModelShape:
    return _dense(
        figures,
        rope=read_rope(figures, percent=0.5),
        qkv_bias=figures.flag("attention_bias"),
        qk_norm=figures.flag("use_qk_norm"),
        **_sigmoid_experts(figures, []),
    )


def _sigmoid_experts(figures: Figures, odd: list[str]) -> dict[str, Any]:
    """DeepSeek-V3's way to choose experts, which GLM-4 MoE took over."""
    layers = figures.count("num_hidden_layers")
    first = figures.maybe("first_k_dense_replace") or 0
    step = figures.count("moe_layer_freq", 1)
    if not figures.flag("norm_topk_prob", True):
        odd.append("norm_topk_prob false: Megatron-core normalises sigmoid scores")
    if (score := figures.text("scoring_func", "sigmoid")) != "sigmoid":
        odd.append(f"scoring_func {score!r}; its experts are chosen by sigmoid")
    if (method := figures.text("topk_method", "noaux_tc")) != "noaux_tc":
        odd.append(f"topk_method {method!r}; noaux_tc is supported")
    groups, best = figures.count("n_group", 1), figures.count("topk_group", 1)
    experts = _experts(
        figures,
        "n_routed_experts",
        shared_ffn=(figures.maybe("n_shared_experts") or 0)
        * figures.count("moe_intermediate_size"),
        score="sigmoid",
        scaling_factor=figures.real("routed_scaling_factor", 1.0),
        groups=groups if groups > 1 else None,
        group_top_k=best if groups > 1 else None,
        score_correction=True,
    )
    return {
        "experts": experts,
        "expert_layers": tuple(i >= first and i % step == 0 for i in range(layers)),
        "draft_layers": figures.maybe("num_nextn_predict_layers") or 0,
        "oddities": tuple(odd),
    }


def _experts(figures: Figures, count_name: str, **more: Any) -> Experts:
    ffn = more.pop("ffn", None) or figures.count("moe_intermediate_size")
    count, top_k = figures.count(count_name), figures.count("num_experts_per_tok")
    if top_k > count:
        raise PlanRefused((f"{figures.where}: {top_k} experts per token of {count}",))
    return Experts(count=count, top_k=top_k, ffn=ffn, **more)


def _gemma3(figures: Figures) -> ModelShape:
    # What its text_config leaves out has the defaults of the published code.
    full = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    full |= {"vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window": 4096}
    figures = Figures({**full, **figures.config}, figures.where)
    return _dense(
        figures,
        tied=figures.flag("tie_word_embeddings", True),
        rope=read_rope(figures, base=1_000_000.0),
        qk_norm=True,
        layer_norms=4,
        window=figures.maybe("sliding_window"),
        activation=figures.text("hidden_activation", "gelu_pytorch_tanh"),
    )


def _gpt_oss(figures: Figures) -> ModelShape:
    layers, ffn = figures.count("num_hidden_layers"), figures.count("intermediate_size")
    bias = figures.flag("attention_bias", True)
    return _dense(
        figures,
        rope=read_rope(figures, base=150_000.0),
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
        window=read_window(figures, layers),
        experts=_experts(figures, "num_local_experts", ffn=ffn, router_bias=True, biases=True),
        expert_layers=(True,) * layers,
    )


_GEMMA = (
    "cannot be trained: Megatron-core has one rotary base for all layers, it has two; norms after "
    "attention and MLP and scaled embeddings have no counterpart either",
)
_GPT_OSS = (
    "cannot be trained: attention sinks are not supported with packed sequences, nor are its "
    "clipped activation and biased experts",
)

ROWS: dict[str, Row] = {
    "LlamaForCausalLM": Row(_llama, "dense"),
    "MistralForCausalLM": Row(_mistral, "dense"),
    "Qwen2ForCausalLM": Row(_qwen2, "dense, biases on query, key and value"),
    "Qwen3ForCausalLM": Row(_qwen3, "dense, norms on query and key"),
    "Qwen3MoeForCausalLM": Row(_qwen3_moe, "experts, norms on query and key"),
    "MixtralForCausalLM": Row(_mixtral, "experts"),
    "DeepseekV3ForCausalLM": Row(_deepseek, "experts, latent attention"),
    "Glm4MoeForCausalLM": Row(_glm4_moe, "experts, half of each head rotated"),
    "Gemma3ForCausalLM": Row(_gemma3, "dense", _GEMMA),
    "Gemma3ForConditionalGeneration": Row(_gemma3, "dense, its text part", _GEMMA),
    "GptOssForCausalLM": Row(_gpt_oss, "experts", _GPT_OSS),
}
