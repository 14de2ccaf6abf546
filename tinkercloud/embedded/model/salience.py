"""Which inputs of its products a bfloat16 model reads as pairs of a rounded number and its error.

The squared error that rounding an input to bfloat16 adds to a product's results is in proportion to
the input's square times the squares of its weights. These differ by orders of magnitude between
inputs, so a few of them, the salient ones (the term is that of AWQ, arXiv 2306.00978), make much of
a layer's error, and their errors as further inputs of the product take that away at a small cost.

So do a few dimensions of each head's keys, by their squares times those of the queries.

They are chosen once for a base model, from its weights and from what enters the products in one
pass over fixed tokens, and hold for every model that is trained from it.

Axes: T tokens of the pass, K inputs of a module, C salient ones.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.architectures.config import ArchitectureConfig
from tinkercloud.architectures.layers import norm_scale
from tinkercloud.architectures.llama import Llama
from tinkercloud.embedded.model.packed_tensors import NUM_SALIENT
from tinkercloud.embedded.native.bindings import NativeModel
from tinkercloud.embedded.native.layered_pass import LayeredPass, Rows
from tinkercloud.embedded.native.packed import (
    KEYS,
    PackedMatrix,
    PackedWeights,
    num_key_errors,
)
from tinkercloud.embedded.native.team import Team

NUM_TOKENS = 128
_BLOCK_TOKENS = 16  # of keys and values
_SPREAD = 2654435761  # tokens from all of the vocabulary (Knuth's multiplicative hashing)
_PANELS_AT_ONCE = 4

Values = NDArray[np.float64]


def salient_inputs(team: Team, architecture: Llama, weights: PackedWeights) -> dict[str, Tensor]:
    """As of `PackedWeights.salient`. weights: bfloat16."""
    chosen: dict[str, Tensor] = {}
    for names, squares in _inputs(team, architecture, weights):
        if names[0].endswith(KEYS):
            chosen[names[0]] = _worst(squares, num_key_errors(squares.shape[1], weights.dtype))
            continue
        harm = squares * sum(_column_squares(weights.matrices[name]) for name in names)
        chosen.update(dict.fromkeys(names, _worst(harm, NUM_SALIENT)))
    return chosen


def _worst(harm: Values, num: int) -> Tensor:
    """Of the last axis, ascending."""
    return torch.from_numpy(np.sort(np.argsort(-harm, kind="stable")[..., :num]))


def _inputs(
    team: Team, architecture: Llama, weights: PackedWeights
) -> Iterator[tuple[tuple[str, ...], Values]]:
    """The mean squares (K,) of what modules read, those together that read the same rows; of keys
    times those of the queries that read them (Hkv, Dh)."""
    config = architecture.config
    before_attention, before_mlp = config.norms.before_attention, config.norms.before_mlp
    layers = _layered_pass(team, architecture, weights)
    x, hidden = layers.embed(), torch.empty(NUM_TOKENS, config.hidden_size)
    for index in range(config.num_layers):
        path, before = f"model.layers.{index}", x.clone()
        is_last = index + 1 == config.num_layers
        kept = layers.layer(index, x, keep=True, hidden=hidden if is_last else None)
        assert kept is not None
        names = tuple(f"{path}.self_attn.{leaf}_proj" for leaf in "qkv")
        yield names, _mean_squares(_normed(config, weights, path, before_attention, before))
        yield (f"{path}.{KEYS}",), _products(kept.q, kept.k)
        yield (f"{path}.self_attn.o_proj",), _mean_squares(_wide(kept.mixed))
        names = f"{path}.mlp.gate_proj", f"{path}.mlp.up_proj"
        yield names, _mean_squares(_normed(config, weights, path, before_mlp, kept.middle))
        product = _gated(config.activation, kept.gates)
        yield (f"{path}.mlp.down_proj",), _mean_squares(product)
    yield ("lm_head",), _mean_squares(_wide(hidden))


def _layered_pass(team: Team, architecture: Llama, weights: PackedWeights) -> LayeredPass:
    config = architecture.config
    num_blocks = -(-NUM_TOKENS // _BLOCK_TOKENS)
    per_token = config.head_dim + num_key_errors(config.head_dim, weights.dtype)
    numbers = num_blocks * _BLOCK_TOKENS * config.num_kv_heads * per_token
    keys, values = torch.zeros(2, numbers, dtype=weights.dtype)
    layers = config.num_layers
    model = NativeModel(config, weights, [keys] * layers, [values] * layers)
    positions = np.arange(NUM_TOKENS)
    rows = Rows(
        positions * _SPREAD % config.vocab_size,
        positions.astype(np.int32),
        np.zeros(NUM_TOKENS, np.int32),
        np.arange(num_blocks, dtype=np.int32)[None],
    )
    rotary = architecture.rotary(torch.arange(NUM_TOKENS))
    return LayeredPass(model, rows, rotary, [], lambda: nullcontext(team))


# By NumPy: the order of PyTorch's sums depends on the number of threads.


def _wide(x: Tensor) -> Values:
    return x.double().numpy()


def _products(q: Tensor, k: Tensor) -> Values:
    """q (T, Hq, Dh), k (T, Hkv, Dh): (Hkv, Dh)."""
    groups = _mean_squares(_wide(q)).reshape(k.shape[1], -1, k.shape[2]).sum(axis=1)
    return groups * _mean_squares(_wide(k))


def _mean_squares(values: Values) -> Values:
    return np.square(values).mean(axis=0)


def _normed(
    config: ArchitectureConfig, weights: PackedWeights, path: str, leaf: str | None, x: Tensor
) -> Values:
    """leaf None: there is no norm."""
    values = _wide(x)
    if leaf is None:
        return values
    name = f"{path}.{leaf}"
    scale = norm_scale(config, name, weights.vectors[name])
    mean_square = np.square(values).mean(axis=1, keepdims=True)
    return values / np.sqrt(mean_square + config.rms_norm_eps) * _wide(scale)


def _gated(activation: str, gates: Tensor) -> Values:
    gate, up = np.split(_wide(gates), 2, axis=1)
    exponent = gate
    if activation == "gelu_tanh":
        exponent = math.sqrt(8 / math.pi) * (gate + 0.044715 * gate**3)
    return gate / (1 + np.exp(-exponent)) * up


def _column_squares(matrix: PackedMatrix) -> Values:
    """Sums of squares of each input's weights (K,)."""
    sums = np.zeros(matrix.packed[0, :, 0].numel())
    for panels in matrix.packed.split(_PANELS_AT_ONCE):
        sums += np.square(_wide(panels)).sum(axis=(0, 2)).reshape(-1)
    return sums[: matrix.shape[1]]
