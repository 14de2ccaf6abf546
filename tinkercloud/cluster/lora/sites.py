"""The linears of a Megatron network that can have adapters, by Hugging Face names.

A *site* is one Megatron linear; it computes one or several Hugging Face projections (q, k and v;
gate and up).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tinkercloud.planning.plan import MegatronArguments

Kind = Literal["column", "row"]
Shape = tuple[int, int]
"""(out, in) of a projection, unsharded."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A Hugging Face linear: its module path, and its rows and columns on this rank."""

    name: str
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Site:
    """One Megatron linear on this rank.

    name: its module path in the network. blocks: its projections; a grouped linear has a block for
    each of its experts. order: which of a block's concatenated rows the fused weight has in each
    place (None: as they are). group: the tensor-parallel group that it is sharded over.
    """

    module: nn.Module
    name: str
    kind: Kind
    blocks: tuple[tuple[Projection, ...], ...]
    order: Tensor | None
    group: ProcessGroup
    is_expert: bool
    is_grouped: bool
    sequence_parallel: bool

    @property
    def projections(self) -> Iterator[Projection]:
        return (projection for block in self.blocks for projection in block)

    def weight_name(self, block: int) -> str:
        """The network's parameter into which the block's adapters can be merged."""
        return f"{self.name}.weight{block}" if self.is_grouped else f"{self.name}.weight"


def dense_shapes(arguments: MegatronArguments) -> dict[str, Shape]:
    """Every projection outside the routed experts, in the order in which a seed draws adapters."""
    shapes: dict[str, Shape] = {}
    for layer in range(arguments.num_layers):
        path = f"model.layers.{layer}"
        for leaf, shape in _attention_shapes(arguments).items():
            shapes[f"{path}.self_attn.{leaf}"] = shape
        if not has_experts(arguments, layer):
            shapes |= _mlp_shapes(f"{path}.mlp", arguments.hidden_size, arguments.ffn_hidden_size)
        elif arguments.moe_shared_expert_intermediate_size:
            size = arguments.moe_shared_expert_intermediate_size
            shapes |= _mlp_shapes(f"{path}.mlp.shared_experts", arguments.hidden_size, size)
    shapes["lm_head"] = (arguments.vocab_size, arguments.hidden_size)
    return shapes


def expert_shapes(arguments: MegatronArguments) -> dict[str, Shape]:
    """The projections of the routed experts."""
    shapes: dict[str, Shape] = {}
    size = arguments.moe_ffn_hidden_size or arguments.ffn_hidden_size
    for layer in range(arguments.num_layers):
        if has_experts(arguments, layer):
            for expert in range(arguments.num_moe_experts or 0):
                path = f"model.layers.{layer}.mlp.experts.{expert}"
                shapes |= _mlp_shapes(path, arguments.hidden_size, size)
    return shapes


def has_experts(arguments: MegatronArguments, layer: int) -> bool:
    if not arguments.num_moe_experts:
        return False
    return not arguments.moe_layer_freq or bool(arguments.moe_layer_freq[layer])


def _attention_shapes(arguments: MegatronArguments) -> dict[str, Shape]:
    hidden, heads = arguments.hidden_size, arguments.num_attention_heads
    if arguments.multi_latent_attention:
        shapes = {"o_proj": (hidden, heads * (arguments.v_head_dim or 0))}
        if arguments.q_lora_rank is None:
            size = (arguments.qk_head_dim or 0) + (arguments.qk_pos_emb_head_dim or 0)
            shapes = {"q_proj": (heads * size, hidden), **shapes}
        return shapes
    q, kv = heads * arguments.kv_channels, arguments.num_query_groups * arguments.kv_channels
    return {
        "q_proj": (q, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, q),
    }


def _mlp_shapes(path: str, hidden: int, inner: int) -> dict[str, Shape]:
    return {
        f"{path}.gate_proj": (inner, hidden),
        f"{path}.up_proj": (inner, hidden),
        f"{path}.down_proj": (hidden, inner),
    }


def find_sites(model: Any, arguments: MegatronArguments) -> list[Site]:
    """Every linear of this rank's GPTModel that can have adapters."""
    finder = _Finder(model, arguments)
    sites: list[Site] = []
    for index, layer in enumerate(model.decoder.layers):
        sites += finder.layer(f"decoder.layers.{index}", layer)
    if model.post_process:
        sites.append(finder.site("output_layer", "column", (("lm_head",),)))
    return sites


class _Finder:
    def __init__(self, model: Any, arguments: MegatronArguments):
        self._model, self._arguments = model, arguments
        self._shapes = {**dense_shapes(arguments), **expert_shapes(arguments)}
        self._shapes["lm_head"] = (arguments.padded_vocab_size, arguments.hidden_size)
        self._tp: Any = parallel_state.get_tensor_model_parallel_group()
        self._etp: Any = parallel_state.get_expert_tensor_parallel_group()

    def layer(self, name: str, layer: Any) -> Iterator[Site]:
        number = layer.layer_number - 1
        path = f"model.layers.{number}"
        names = tuple(f"{path}.self_attn.{leaf}_proj" for leaf in "qkv")
        if not self._arguments.multi_latent_attention:
            yield self.site(f"{name}.self_attention.linear_qkv", "column", (names,))
        elif self._arguments.q_lora_rank is None:
            yield self.site(f"{name}.self_attention.linear_q_proj", "column", (names[:1],))
        o_proj = f"{path}.self_attn.o_proj"
        yield self.site(f"{name}.self_attention.linear_proj", "row", ((o_proj,),))
        if has_experts(self._arguments, number):
            yield from self._experts(layer.mlp, f"{name}.mlp", f"{path}.mlp")
        else:
            yield from self._mlp(f"{name}.mlp", (f"{path}.mlp",))

    def _mlp(self, name: str, paths: tuple[str, ...], is_expert: bool = False) -> Iterator[Site]:
        """paths: the Hugging Face modules, several for a grouped linear."""
        both = tuple((f"{path}.gate_proj", f"{path}.up_proj") for path in paths)
        down = tuple((f"{path}.down_proj",) for path in paths)
        yield self.site(f"{name}.linear_fc1", "column", both, is_expert)
        yield self.site(f"{name}.linear_fc2", "row", down, is_expert)

    def _experts(self, moe: Any, name: str, path: str) -> Iterator[Site]:
        if getattr(moe, "shared_experts", None) is not None:
            yield from self._mlp(f"{name}.shared_experts", (f"{path}.shared_experts",))
        paths = tuple(f"{path}.experts.{expert}" for expert in moe.local_expert_indices)
        if hasattr(moe.experts, "local_experts"):
            for i, module in enumerate(paths):
                yield from self._mlp(f"{name}.experts.local_experts.{i}", (module,), is_expert=True)
        else:
            yield from self._mlp(f"{name}.experts", paths, is_expert=True)

    def site(
        self, name: str, kind: Kind, blocks: tuple[tuple[str, ...], ...], is_expert: bool = False
    ) -> Site:
        module = self._model.get_submodule(name)
        group = self._etp if is_expert else self._tp
        return Site(
            module,
            name,
            kind,
            tuple(tuple(self._projection(n, kind, group.size()) for n in b) for b in blocks),
            self._qkv_order() if len(blocks[0]) == 3 else None,
            group,
            is_expert,
            hasattr(module, "weight0"),
            self._arguments.sequence_parallel and self._tp.size() > 1 and not is_expert,
        )

    def _projection(self, name: str, kind: Kind, parts: int) -> Projection:
        rows, columns = self._shapes[name]
        if kind == "column":
            return Projection(name, rows // parts, columns)
        return Projection(name, rows, columns // parts)

    def _qkv_order(self) -> Tensor:
        tp, arguments = self._tp.size(), self._arguments
        return fused_qkv_order(
            arguments.num_attention_heads // tp,
            arguments.num_query_groups // tp,
            arguments.kv_channels,
        )


def fused_qkv_order(num_heads: int, num_groups: int, size: int) -> Tensor:
    """Rows of [all q | all k | all v] in the order of Megatron's linear_qkv: [q .. q, k, v] for
    each group of query heads that shares k and v."""
    per_group = num_heads // num_groups * size
    q = torch.arange(num_heads * size).view(num_groups, per_group)
    k = torch.arange(num_groups * size).view(num_groups, size) + num_heads * size
    v = k + num_groups * size
    return torch.cat((q, k, v), 1).flatten()
