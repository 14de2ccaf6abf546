"""What an architecture's forward pass reads its weights through when it trains.

Axes: T packed rows (several sequences, no padding between them), Hq/Hkv heads, Dh head size.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkercloud.architectures.blocks import Scoring
from tinkercloud.architectures.layers import attend_many
from tinkercloud.weights.adapters import Adapter


def lora_delta(x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """(alpha / rank) B A x (T, out), float32; x (T, in). PEFT too rounds it only when added."""
    return F.linear(F.linear(x.float(), a), b) * scale


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scoring: Scoring | None = None
) -> Tensor:
    """Causal attention inside each packed sequence. q (T, Hq, Dh), k and v (T, Hkv, Dh). scoring
    None: scores have the scale Dh ** -0.5 alone."""
    scoring = scoring or Scoring(q.shape[2] ** -0.5)
    parts = zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True)
    alone = ([x.transpose(0, 1)[None] for x in part] for part in parts)
    outputs = [attend_many(one_q, one_k, one_v, scoring)[0] for one_q, one_k, one_v in alone]
    return torch.cat([out.transpose(0, 1) for out in outputs])


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

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        return causal_attention(q, k, v, self._lengths, scoring)
