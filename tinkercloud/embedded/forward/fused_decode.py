"""The decode step of plain networks (`ArchitectureConfig.is_plain`), written out for our kernels:
in fewer launches.

A step of one row reads every weight once and does little else; launches of small kernels would take
as long as the reading. It computes, and rounds, what `DecodeModel` does.

Axes: B rows, W blocks of a table, D hidden, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from tinkercloud.architectures.layers import Show
from tinkercloud.architectures.llama import Llama
from tinkercloud.embedded.forward import attention_kernel
from tinkercloud.embedded.forward import decode_kernels as kernels
from tinkercloud.embedded.forward.adapter_bank import AdapterBank
from tinkercloud.embedded.forward.decode_step import Inputs, Step
from tinkercloud.embedded.forward.kv_blocks import BlockPool

FEW_ROWS = 16
"""Up to so many rows a low-rank product reads the factors row by row; for more, matrix products
with the factors of all slots at once are faster."""


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
            gate, up = (self._linear(f"{path}.mlp.{n}_proj", normed) for n in ("gate", "up"))
            added = self._linear(f"{path}.mlp.down_proj", kernels.swiglu(gate, up))
        normed = self._norm("model.norm", x, added)
        if show is not None:
            show(self.architecture.config.num_layers, normed)
        return self._linear("lm_head", normed)

    def _attention(self, index: int, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        path = f"model.layers.{index}.self_attn"
        keys, values = self.pool.keys[index], self.pool.values[index]
        q, k, v = (self._linear(f"{path}.{n}_proj", x) for n in "qkv")
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

    def _linear(self, name: str, x: Tensor) -> Tensor:
        y = F.linear(x, self.weights[name], self.weights.get(f"{name}.bias"))
        bank = self.bank
        if bank is None or name not in bank:
            return y
        if len(x) > FEW_ROWS:
            y += bank.delta(name, x, self.at.adapters)
            return y
        factors = (bank.down[name], bank.up[name])
        kernels.add_low_rank(y, x, factors, bank.scales, self.at.adapters)
        return y
