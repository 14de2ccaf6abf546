"""Which Hugging Face tensors a Megatron parameter is made of, and how it is sharded over ranks.

One mapping for everything that is shaped like a parameter: weights, gradients, Adam's moments. It
has the names of both of Megatron's layer specs, Transformer Engine's and the local one. (mbridge
and megatron-bridge map weights only, have the first spec's names only, and look for rotary
parameters where transformers 5 no longer writes them.)

`shard` makes this rank's shard of full tensors, `unshard` full tensors of the shards of all ranks
that a parameter is sharded over; each is the inverse of the other.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from tinkercloud.errors import ConfigError
from tinkercloud.planning.plan import MegatronArguments

Split = Literal["replicated", "tp", "etp"]
"""The ranks that a parameter is sharded over: none, tensor-parallel ones, those of experts."""


class Sliceable(Protocol):
    """A tensor, or a tensor in a file, of which only the indexed part is read."""

    def __getitem__(self, index: Any) -> Tensor: ...


Source = Callable[[str], Sliceable]


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter (or buffer) of this rank's network.

    parameter: its name in the network. names: the Hugging Face tensors, in order. is_expert:
    whether the ranks of an expert-parallel group have different experts under this name.
    """

    parameter: str
    names: tuple[str, ...]
    split: Split
    is_expert: bool
    form: "Form"

    def shard(self, source: Source, rank: int, size: int) -> Tensor:
        """This rank's shard, of `size` shards."""
        return self.form.shard([source(name) for name in self.names], rank, size)

    def unshard(self, shards: Sequence[Tensor]) -> dict[str, Tensor]:
        """The full tensors by name. shards: all, in rank order."""
        return dict(zip(self.names, self.form.unshard(shards), strict=True))


class Form(Protocol):
    def shard(self, fulls: Sequence[Sliceable], rank: int, size: int) -> Tensor: ...

    def unshard(self, shards: Sequence[Tensor]) -> list[Tensor]: ...


@dataclass(frozen=True, slots=True)
class Replicated:
    """The same on every rank."""

    def shard(self, fulls: Sequence[Sliceable], rank: int, size: int) -> Tensor:
        return fulls[0][:]

    def unshard(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [shards[0]]


@dataclass(frozen=True, slots=True)
class Rows:
    """Sharded by rows; of several tensors (gate and up) the shards are stacked."""

    rows: int  # of one full tensor

    def shard(self, fulls: Sequence[Sliceable], rank: int, size: int) -> Tensor:
        each = self.rows // size
        parts = [full[rank * each : (rank + 1) * each] for full in fulls]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def unshard(self, shards: Sequence[Tensor]) -> list[Tensor]:
        each = self.rows // len(shards)
        return [torch.cat(parts) for parts in zip(*(s.split(each) for s in shards), strict=True)]


@dataclass(frozen=True, slots=True)
class Columns:
    columns: int

    def shard(self, fulls: Sequence[Sliceable], rank: int, size: int) -> Tensor:
        each = self.columns // size
        return fulls[0][:, rank * each : (rank + 1) * each]

    def unshard(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(shards), 1)]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Rows of the vocabulary, padded with rows of zeros so that shards are of one size."""

    rows: int
    padded: int

    def shard(self, fulls: Sequence[Sliceable], rank: int, size: int) -> Tensor:
        each = self.padded // size
        part = fulls[0][min(rank * each, self.rows) : min((rank + 1) * each, self.rows)]
        if len(part) == each:
            return part
        return torch.cat((part, part.new_zeros(each - len(part), *part.shape[1:])))

    def unshard(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(shards))[: self.rows]]


@dataclass(frozen=True, slots=True)
class FusedQKV:
    """Megatron's linear_qkv: for each group [its heads of q, its k, its v] (weights or biases)."""

    groups: int
    heads_per_group: int
    head_size: int

    def shard(self, fulls: Sequence[Sliceable], rank: int, size: int) -> Tensor:
        groups = self.groups // size
        parts = []
        for full, heads in zip(fulls, (self.heads_per_group, 1, 1), strict=True):
            rows = groups * heads * self.head_size
            part = full[rank * rows : (rank + 1) * rows]
            parts.append(part.reshape(groups, heads * self.head_size, *part.shape[1:]))
        return torch.cat(parts, 1).flatten(0, 1)

    def unshard(self, shards: Sequence[Tensor]) -> list[Tensor]:
        fused = torch.cat(list(shards))
        grouped = fused.reshape(self.groups, -1, *fused.shape[1:])
        size = self.head_size
        parts = grouped.split((self.heads_per_group * size, size, size), 1)
        return [part.flatten(0, 1).contiguous() for part in parts]


_NORM = {
    "input_layernorm.weight": "input_layernorm",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm",
    "self_attention.linear_q_proj.layer_norm_weight": "input_layernorm",
    "pre_mlp_layernorm.weight": "post_attention_layernorm",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm",
    "self_attention.q_layernorm.weight": "self_attn.q_norm",
    "self_attention.k_layernorm.weight": "self_attn.k_norm",
}
_LATENT_NORM = {
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm",
}
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<local>\d+)\.)?linear_fc(?P<fc>[12])\."
    r"weight(?P<grouped>\d*)"
)


@dataclass(frozen=True, slots=True)
class _Names:
    """How an architecture names its experts."""

    moe: str
    router: str
    gate: str
    up: str
    down: str


_USUAL = _Names("mlp", "mlp.gate", "gate_proj", "up_proj", "down_proj")
_MIXTRAL = _Names("block_sparse_moe", "block_sparse_moe.gate", "w1", "w3", "w2")


class WeightMap:
    """The entries of one rank's network. expert_rank: this rank's in its expert-parallel group."""

    def __init__(self, arguments: MegatronArguments, architecture: str, expert_rank: int):
        self._a = arguments
        self._names = _MIXTRAL if architecture == "MixtralForCausalLM" else _USUAL
        experts = arguments.num_moe_experts or 0
        self._first_expert = expert_rank * (experts // arguments.expert_model_parallel_size)

    def entries(self, model: Any) -> Iterator[Entry]:
        """Of every parameter, and every router's bias, in the order of the network."""
        for name, _ in named_tensors(model):
            yield self.entry(name, model)

    def entry(self, name: str, model: Any) -> Entry:
        """Raises ConfigError for a parameter without a Hugging Face counterpart."""
        match name.split(".", 3):
            case ["embedding", *_]:
                return self._vocabulary(name, "model.embed_tokens.weight")
            case ["output_layer", *_]:
                tied = not self._a.untie_embeddings_and_output_weights
                head = "model.embed_tokens.weight" if tied else "lm_head.weight"
                return self._vocabulary(name, head)
            case ["decoder", "final_layernorm", *_]:
                return Entry(name, ("model.norm.weight",), "replicated", False, Replicated())
            case ["decoder", "layers", index, rest]:
                layer = model.decoder.layers[int(index)].layer_number - 1
                entry = self._in_layer(name, rest, f"model.layers.{layer}.")
                if entry is not None:
                    return _as_built(entry, model)
        raise ConfigError(f"no Hugging Face tensor is known for Megatron's {name}")

    def _vocabulary(self, name: str, hf_name: str) -> Entry:
        form = Vocabulary(self._a.vocab_size, self._a.padded_vocab_size)
        return Entry(name, (hf_name,), "tp", False, form)

    def _in_layer(self, name: str, rest: str, path: str) -> Entry | None:
        norms = _NORM | (_LATENT_NORM if self._a.multi_latent_attention else {})
        if rest in norms:
            return Entry(name, (f"{path}{norms[rest]}.weight",), "replicated", False, Replicated())
        if rest.startswith("self_attention."):
            return self._attention(name, rest.removeprefix("self_attention."), path)
        if match := _EXPERT.fullmatch(rest):
            return self._expert(name, match, path)
        return self._mlp(name, rest, path)

    def _attention(self, name: str, rest: str, path: str) -> Entry | None:
        a, path = self._a, f"{path}self_attn."
        linear, kind = rest.rsplit(".", 1)
        if linear == "linear_qkv":
            heads = a.num_attention_heads // a.num_query_groups
            form = FusedQKV(a.num_query_groups, heads, a.kv_channels)
            names = tuple(f"{path}{x}_proj.{kind}" for x in "qkv")
            return Entry(name, names, "tp", False, form)
        heads = a.num_attention_heads
        if linear == "linear_proj":
            inner = heads * ((a.v_head_dim or 0) if a.multi_latent_attention else a.kv_channels)
            return Entry(name, (f"{path}o_proj.weight",), "tp", False, Columns(inner))
        query = heads * ((a.qk_head_dim or 0) + (a.qk_pos_emb_head_dim or 0))
        key_value = heads * ((a.qk_head_dim or 0) + (a.v_head_dim or 0))
        rows = {
            "linear_q_down_proj": ("q_a_proj", a.q_lora_rank or 0),
            "linear_kv_down_proj": (
                "kv_a_proj_with_mqa",
                (a.kv_lora_rank or 0) + (a.qk_pos_emb_head_dim or 0),
            ),
            "linear_q_proj": ("q_proj", query),
            "linear_q_up_proj": ("q_b_proj", query),
            "linear_kv_up_proj": ("kv_b_proj", key_value),
        }
        if linear in rows:
            leaf, size = rows[linear]
            return Entry(name, (f"{path}{leaf}.weight",), "tp", False, Rows(size))
        return None

    def _mlp(self, name: str, rest: str, path: str) -> Entry | None:
        a = self._a
        if rest == "mlp.router.weight":
            return Entry(
                name, (f"{path}{self._names.router}.weight",), "replicated", False, Replicated()
            )
        if rest == "mlp.router.expert_bias":
            bias = f"{path}{self._names.router}.e_score_correction_bias"
            return Entry(name, (bias,), "replicated", False, Replicated())
        inner = {
            "mlp.": a.ffn_hidden_size,
            "mlp.shared_experts.": a.moe_shared_expert_intermediate_size or 0,
        }
        for prefix, size in inner.items():
            if rest == f"{prefix}linear_fc1.weight":
                names = (f"{path}{prefix}gate_proj.weight", f"{path}{prefix}up_proj.weight")
                return Entry(name, names, "tp", False, Rows(size))
            if rest == f"{prefix}linear_fc2.weight":
                return Entry(name, (f"{path}{prefix}down_proj.weight",), "tp", False, Columns(size))
        return None

    def _expert(self, name: str, match: re.Match[str], path: str) -> Entry:
        number = self._first_expert + int(match["local"] or match["grouped"] or 0)
        names, size = self._names, self._a.moe_ffn_hidden_size or self._a.ffn_hidden_size
        path = f"{path}{names.moe}.experts.{number}."
        if match["fc"] == "1":
            both = (f"{path}{names.gate}.weight", f"{path}{names.up}.weight")
            return Entry(name, both, "etp", True, Rows(size))
        return Entry(name, (f"{path}{names.down}.weight",), "etp", True, Columns(size))


def _as_built(entry: Entry, model: Any) -> Entry:
    """The down projections of latent attention are replicated by Transformer Engine's layer spec,
    and sharded by the local one."""
    if "_down_proj" not in entry.parameter:
        return entry
    assert isinstance(entry.form, Rows)
    is_full = len(model.get_parameter(entry.parameter)) == entry.form.rows
    return replace(entry, split="replicated", form=Replicated()) if is_full else entry


def named_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the buffers that are weights too: the routers' biases."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            yield name, buffer


def full_shapes(entry: Entry, shard: Tensor) -> dict[str, Any]:
    """Shapes of the entry's full tensors, from the shape of a shard."""
    rest = tuple(shard.shape[1:])
    match entry.form:
        case Vocabulary(rows, _):
            return {entry.names[0]: (rows, *rest)}
        case FusedQKV(groups, heads, size):
            rows = (groups * heads * size, groups * size, groups * size)
            return {n: (r, *rest) for n, r in zip(entry.names, rows, strict=True)}
        case Rows(rows):
            return dict.fromkeys(entry.names, (rows, *rest))
        case Columns(columns):
            return {entry.names[0]: (shard.shape[0], columns)}
    return {entry.names[0]: tuple(shard.shape)}
