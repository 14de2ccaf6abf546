"""A draft head: one decoder layer that reads the target's hidden states and predicts its tokens.

The design is EAGLE-3's (2503.01840): the outputs of a few of the target's layers are fused into one
feature; row i of a sequence reads the feature of position i and the embedding of token i + 1, and
gives the distribution of token i + 2. After a drafted token its own output takes the place of the
feature. Embedding and unembedding are rows of the target's, frozen.

Pure functions over a dict of parameters. Axes: B sequences, N rows of each, L fused layers,
D hidden, Hq and Hkv query and key/value heads, Dh head size, V vocabulary, Vd draft vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkercloud.architectures.config import ArchitectureConfig
from tinkercloud.architectures.layers import gated, rms_norm, rotary_frequencies, rotate
from tinkercloud.speculative.head.vocabulary import DraftVocabulary

FUSE, QKV, OUT = ("fuse",), ("q_proj", "k_proj", "v_proj"), ("o_proj",)
GATE_UP, DOWN = ("gate_proj", "up_proj"), ("down_proj",)
Params = Mapping[str, Tensor]
Embed = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """target: whose head it is, and whose sizes it has but for `intermediate_size`. layers: whose
    outputs are fused, 1 the first block's, `num_layers` what follows the final norm."""

    target: ArchitectureConfig
    layers: tuple[int, ...]
    intermediate_size: int

    def __post_init__(self) -> None:
        last = self.target.num_layers
        if not self.layers or not all(1 <= layer <= last for layer in self.layers):
            raise ValueError(f"layers are numbers from 1 to {last}, not {self.layers}")

    @classmethod
    def of(cls, target: ArchitectureConfig, layers: tuple[int, ...] | None = None) -> "HeadConfig":
        return cls(target, layers or default_layers(target.num_layers), target.intermediate_size)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every trained tensor; a linear is (out, in)."""
        hidden, inner = self.target.hidden_size, self.intermediate_size
        q = self.target.num_heads * self.target.head_dim
        kv = self.target.num_kv_heads * self.target.head_dim
        return {
            "fuse": (hidden, len(self.layers) * hidden),
            "feature_norm": (hidden,),
            "embed_norm": (hidden,),
            "q_proj": (q, 2 * hidden),
            "k_proj": (kv, 2 * hidden),
            "v_proj": (kv, 2 * hidden),
            "o_proj": (hidden, q),
            "mlp_norm": (hidden,),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
            "norm": (hidden,),
        }


def default_layers(num_layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer, as far as there are three."""
    return tuple(sorted({min(3, num_layers), -(-num_layers // 2), num_layers}))


def initial_params(config: HeadConfig, seed: int) -> dict[str, Tensor]:
    """float32, drawn on the CPU. The fused feature begins as the highest layer's and the block adds
    nearly nothing to it, so that a new head starts from what the target knows."""
    generator = torch.Generator().manual_seed(seed)
    params: dict[str, Tensor] = {}
    for name, shape in config.shapes().items():
        if name.endswith("norm"):
            params[name] = torch.ones(shape)
        else:
            params[name] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    hidden = config.target.hidden_size
    params["fuse"] *= 0.1
    params["fuse"][:, -hidden:] += torch.eye(hidden)
    params["o_proj"] *= 0.1
    params["down_proj"] *= 0.1
    return params


@dataclass(frozen=True, slots=True)
class FrozenRows:
    """The target's, which the head shares. embed: int64 tokens (...) -> their rows (..., D), read
    from the target's own; unembed (Vd, D), float32, a copy of the rows that the draft vocabulary
    names."""

    embed: Embed
    unembed: Tensor
    vocabulary: DraftVocabulary

    @classmethod
    def of(
        cls,
        weights: Mapping[str, Tensor],
        vocabulary: DraftVocabulary,
        embed: Embed | None = None,
    ) -> "FrozenRows":
        """weights: the target's, by Hugging Face module name. embed: None where a tensor of
        `weights` is there to be looked up in."""
        unembed = weights["lm_head"].detach()
        ids = vocabulary.ids.to(unembed.device)
        if embed is None:
            embed = partial(F.embedding, weight=weights["model.embed_tokens"].detach())
        return cls(embed, unembed[ids].float(), vocabulary)


@dataclass(frozen=True, slots=True)
class Projected:
    """q (B, Hq, N, Dh), k and v (B, Hkv, N, Dh), q and k rotated."""

    q: Tensor
    k: Tensor
    v: Tensor


class Head:
    """The layer's arithmetic, on the device of the target's rows, where all arguments lie too;
    attention is the caller's, between `project` and `finish`. vocabulary: the frozen rows', there.
    """

    def __init__(self, config: HeadConfig, frozen: FrozenRows):
        self.config = config
        self.frozen = frozen
        frequencies, self._magnitude = rotary_frequencies(config.target)
        self.device = frozen.unembed.device
        self.vocabulary = frozen.vocabulary.on(self.device)
        self._frequencies = frequencies.to(self.device)

    def placed(self, params: Params) -> dict[str, Tensor]:
        """The parameters on its device; themselves where they lie there already."""
        return {name: tensor.to(self.device) for name, tensor in params.items()}

    def fuse(self, params: Params, hidden: Tensor) -> Tensor:
        """hidden (..., L, D) -> feature (..., D), float32. States grow with depth, so that each is
        scaled to length sqrt(D) before they are mixed."""
        ones = params["feature_norm"].new_ones(hidden.shape[-1])
        normed = rms_norm(hidden.detach().float(), ones, self.config.target.rms_norm_eps)
        return self._linears(params, FUSE, normed.flatten(-2))[0]

    def project(
        self, params: Params, feature: Tensor, tokens: Tensor, positions: Tensor
    ) -> Projected:
        """feature (B, N, D), tokens and positions int64 (B, N)."""
        embedded = self.frozen.embed(tokens).float()
        normed = self._norm(params, "embed_norm", embedded)
        x = torch.cat((normed, self._norm(params, "feature_norm", feature)), -1)
        cos, sin = self.rotary(positions)
        q, k, v = map(self._heads, self._linears(params, QKV, x))
        return Projected(rotate(q, cos, sin), rotate(k, cos, sin), v)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (..., R / 2) of positions (...), of the R dimensions of a head that are
        rotated."""
        angles = positions.float().unsqueeze(-1) * self._frequencies
        return angles.cos() * self._magnitude, angles.sin() * self._magnitude

    def finish(self, params: Params, feature: Tensor, mixed: Tensor) -> Tensor:
        """feature (B, N, D), attention's result (B, Hq, N, Dh) -> the block's output (B, N, D)."""
        (added,) = self._linears(params, OUT, mixed.transpose(1, 2).flatten(-2))
        x = feature + added
        normed = self._norm(params, "mlp_norm", x)
        gate, up = self._linears(params, GATE_UP, normed)
        return x + self._linears(params, DOWN, gated("silu", gate, up))[0]

    def logits(self, params: Params, output: Tensor) -> Tensor:
        """(..., D) -> (..., Vd), float32."""
        return F.linear(self._norm(params, "norm", output), self.frozen.unembed)

    def _linears(self, params: Params, names: tuple[str, ...], x: Tensor) -> list[Tensor]:
        """Modules that read the same inputs."""
        return [F.linear(x, params[name]) for name in names]

    def _heads(self, projected: Tensor) -> Tensor:
        size = self.config.target.head_dim
        return projected.unflatten(-1, (-1, size)).transpose(1, 2)

    def _norm(self, params: Params, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, params[name], self.config.target.rms_norm_eps)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """q (B, Hq, N, Dh), k (B, Hkv, C, Dh) -> (B, Hkv, Hq / Hkv, N, C), scaled by Dh ** -0.5."""
    grouped = q.unflatten(1, (k.shape[1], -1))
    flat = grouped.flatten(2, 3) @ k.transpose(-1, -2)
    return flat.unflatten(2, grouped.shape[2:4]) * q.shape[-1] ** -0.5


def mix(shares: Tensor, v: Tensor) -> Tensor:
    """shares (B, Hkv, G, N, C), v (B, Hkv, C, Dh) -> (B, Hq, N, Dh)."""
    flat = shares.flatten(2, 3) @ v
    return flat.unflatten(2, shares.shape[2:4]).flatten(1, 2)
