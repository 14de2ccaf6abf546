"""What an architecture's forward pass reads its weights through when it trains.

Axes: T packed rows (several sequences, no padding between them), Hq/Hkv heads, Dh head size.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkercloud.weights.adapters import Adapter


def lora_delta(x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """(alpha / rank) B A x (T, out), float32; x (T, in). PEFT too rounds it only when added."""
    return F.linear(F.linear(x.float(), a), b) * scale


def causal_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Causal attention inside each packed sequence. q (T, Hq, Dh), k and v (T, Hkv, Dh)."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
    outputs = []
    for qs, ks, vs in zip(
        q.split(list(lengths)), k.split(list(lengths)), v.split(list(lengths)), strict=True
    ):
        out = F.scaled_dot_product_attention(
            qs.transpose(0, 1)[None], ks.transpose(0, 1)[None], vs.transpose(0, 1)[None],
            is_causal=True,
        )  # fmt: skip
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


class TrainContext:
    """Reads a model's weights with gradients: adapters of frozen weights, or trainable weights.

    weights: the base's tensors by name. adapter and scale: the LoRA part, or None. full: trainable
    float32 weights by name that replace the base's, cast to the base's dtype, or None.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        lengths: Sequence[int],
        *,
        adapter: Adapter | None = None,
        scale: float = 1.0,
        full: Mapping[str, Tensor] | None = None,
    ):
        self._base = weights
        self._adapter = adapter or {}
        self._scale = scale
        self._full = full or {}
        self._lengths = lengths
        self._dtype = weights["model.norm"].dtype

    def _weight(self, name: str) -> Tensor:
        return self._full[name].to(self._dtype) if name in self._full else self._base[name]

    def _bias(self, name: str) -> Tensor | None:
        path = f"{name}.bias"
        return self._weight(path) if path in self._full or path in self._base else None

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = self._product(name, x)
        if name in self._adapter:
            y = (y + lora_delta(x, *self._adapter[name], self._scale)).to(x.dtype)
        return y

    def _product(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._weight(name), self._bias(name))

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self._weight("model.embed_tokens"))

    def norm_weight(self, name: str) -> Tensor:
        return self._weight(name)

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v, self._lengths)
