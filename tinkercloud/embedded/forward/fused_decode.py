"""The decode step of plain networks (`ArchitectureConfig.is_plain`), written out for our kernels:
in fewer launches.

A step of one row reads every weight once and does little else; launches of small kernels would take
as long as the reading. It computes, and rounds, what `DecodeModel` does.

Axes: B rows, W blocks of a table, D hidden, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from tinkercloud.architectures.layers import Show
from tinkercloud.architectures.llama import Llama
from tinkercloud.embedded.forward import attention_kernel
from tinkercloud.embedded.forward import decode_kernels as kernels
from tinkercloud.embedded.forward import projection_kernels as projections
from tinkercloud.embedded.forward.adapter_bank import AdapterBank
from tinkercloud.embedded.forward.decode_step import Inputs, Step
from tinkercloud.embedded.forward.kv_blocks import BlockPool


class FusedModel(Step):
    """A step by Triton kernels."""

    __slots__ = ()

    def logits(
        self, inputs: Inputs, pool: BlockPool, bank: AdapterBank | None, show: Show | None
    ) -> Tensor:
        return _Run(self.architecture, self.weights, pool, inputs, bank).logits(show)


@dataclass(frozen=True, slots=True)
class _Run:
    """One step."""

    architecture: Llama
    weights: Mapping[str, Tensor]
    pool: BlockPool
    at: Inputs
    bank: AdapterBank | None

    def logits(self, show: Show | None) -> Tensor:
        """(B, V)."""
        rotary = self.architecture.rotary(self.at.positions)
        x = F.embedding(self.at.tokens, self.weights["model.embed_tokens"])
        added = None
        for index in range(self.architecture.config.num_layers):
            path = f"model.layers.{index}"
            normed = self._norm(f"{path}.input_layernorm", x, added)
            if show is not None and index:
                show(index, x)  # add_norm has just added the output of the block before
            added = self._attention(index, normed, rotary)
            normed = self._norm(f"{path}.post_attention_layernorm", x, added)
            gated = self._gated(f"{path}.mlp.gate_proj", f"{path}.mlp.up_proj", normed)
            added = self._linear(f"{path}.mlp.down_proj", gated)
        normed = self._norm("model.norm", x, added)
        if show is not None:
            show(self.architecture.config.num_layers, normed)
        return self._linear("lm_head", normed)

    def _attention(self, index: int, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        path = f"model.layers.{index}.self_attn"
        keys, values = self.pool.keys[index], self.pool.values[index]
        q, k, v = self._linears([f"{path}.{n}_proj" for n in "qkv"], x)
        norms = None
        if self.architecture.config.qk_norm:
            q_norm, k_norm = (self.weights[f"{path}.{n}_norm"] for n in "qk")
            norms = (q_norm, k_norm, self.architecture.config.rms_norm_eps)
        kernels.rotate_and_cache((q, k, v), rotary, norms, (keys, values), self.at)
        heads = q.unflatten(-1, (-1, keys.shape[2]))
        mixed = attention_kernel.paged_attention(
            heads, keys, values, self.at.tables, self.at.lengths
        )
        return self._linear(f"{path}.o_proj", mixed.flatten(1))

    def _norm(self, name: str, x: Tensor, added: Tensor | None) -> Tensor:
        eps = self.architecture.config.rms_norm_eps
        return kernels.add_norm(x, added, self.weights[name], eps)

    def _gated(self, gate: str, up: str, x: Tensor) -> Tensor:
        if projections.can_project(x):
            return projections.project_gated(x, gate, up, self.weights, self._slotted())
        return kernels.swiglu(self._linear(gate, x), self._linear(up, x))

    def _linears(self, names: Sequence[str], x: Tensor) -> tuple[Tensor, ...]:
        """As many as three, which read the same x."""
        if projections.can_project(x):
            return projections.project(x, names, self.weights, self._slotted())
        return tuple(self._linear(name, x) for name in names)

    def _slotted(self) -> projections.Bank | None:
        return None if self.bank is None else projections.Bank(self.bank, self.at.adapters)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        if projections.can_project(x):
            return self._linears([name], x)[0]
        y = F.linear(x, self.weights[name], self.weights.get(f"{name}.bias"))
        bank = self.bank
        if bank is not None and name in bank:
            y += bank.delta(name, x, self.at.adapters)
        return y
