"""Qwen3 dense (`Qwen3ForCausalLM`): Llama with an RMS norm on every query and key head."""

from torch import Tensor

from tinkercloud.architectures.layers import Context
from tinkercloud.architectures.llama import Llama


class Qwen3(Llama):
    def _norm_heads(self, ctx: Context, path: str, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self._norm(ctx, f"{path}.q_norm", q), self._norm(ctx, f"{path}.k_norm", k)
