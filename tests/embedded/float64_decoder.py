"""The Llama decoder in float64, written plainly: what passes in any number type are measured by.

Axes: T tokens, D hidden, Hq/Hkv heads, Dh head size, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.embedded.decode_scene import Scene
from tinkercloud.embedded.model.version import Version


def assert_near(scene: Scene, steps: Sequence[Tensor]) -> None:
    """The logits (S, V) of a scene's last steps are those of float64 up to rounding."""
    versions = [version for version, count in scene.versions for _ in range(count)]
    for row, (version, tokens) in enumerate(zip(versions, scene.tokens, strict=True)):
        exact = logits(version, tokens)
        near = rounding_of(version, exact)
        for step, at in zip(steps, range(-len(steps), 0), strict=True):
            error = float((step[row].double() - exact[at]).abs().max())
            assert error <= near[at], (row, at, error)


def rounding_of(version: Version, exact: Tensor) -> Tensor:
    """How far logits in the version's number type may be from the exact ones (T, V) of a sequence,
    (T,): n u max |logits| for n additions of unit roundoff u, one after the other (Higham, Accuracy
    and Stability of Numerical Algorithms, section 3.1)."""
    roundoff = torch.finfo(version.base.dtype).eps / 2
    return chain_length(version, len(exact)) * roundoff * exact.abs().amax(-1)


def logits(version: Version, tokens: Sequence[int]) -> Tensor:
    """(T, V) float64 after each token. Weights and angles as the version has them, adapters added
    to the weights; all arithmetic in float64."""
    config, base = version.base.config, version.base
    cos, sin = base.architecture.rotary(torch.arange(len(tokens)))
    angles = cos.double()[:, None], sin.double()[:, None]
    x = _weight(version, "model.embed_tokens")[torch.tensor(tokens)]
    for layer in range(config.num_layers):
        path = f"model.layers.{layer}"
        x = x + _attention(version, path, _norm(version, f"{path}.input_layernorm", x), angles)
        normed = _norm(version, f"{path}.post_attention_layernorm", x)
        gate, up = (normed @ _weight(version, f"{path}.mlp.{n}_proj").T for n in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ _weight(version, f"{path}.mlp.down_proj").T
    return _norm(version, "model.norm", x) @ _weight(version, "lm_head").T


def chain_length(version: Version, num_tokens: int) -> int:
    """Additions, one after the other, between a token and its logits: the sums of a layer's
    products and of its attention, with an adapter's rank beside each; times layers; unembedding."""
    config = version.base.config
    rank = max((a.shape[0] for a, _ in (version.adapter or {}).values()), default=0)
    heads = config.num_heads * config.head_dim
    products = (config.hidden_size, heads, config.hidden_size, config.intermediate_size)
    layer = sum(products) + len(products) * rank + config.head_dim + num_tokens
    return config.num_layers * layer + config.hidden_size + rank


def _weight(version: Version, name: str) -> Tensor:
    weight = version.weights[name].double()
    if version.adapter is not None and name in version.adapter:
        a, b = version.adapter[name]
        weight = weight + version.scale * b.double() @ a.double()
    return weight


def _norm(version: Version, name: str, x: Tensor) -> Tensor:
    mean = x.pow(2).mean(-1, keepdim=True)
    return _weight(version, name) * x / (mean + version.base.config.rms_norm_eps).sqrt()


def _attention(version: Version, path: str, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    config = version.base.config
    q, k, v = (
        (x @ _weight(version, f"{path}.self_attn.{n}_proj").T).unflatten(-1, (-1, config.head_dim))
        for n in "qkv"
    )
    q, k = _rotated(q, *angles), _rotated(k, *angles)
    k, v = (t.repeat_interleave(config.num_heads // config.num_kv_heads, dim=1) for t in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * config.head_dim**-0.5
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    shares = scores.masked_fill(later, -torch.inf).softmax(-1)
    mixed = torch.einsum("hts,shd->thd", shares, v)
    return mixed.flatten(1) @ _weight(version, f"{path}.self_attn.o_proj").T


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
