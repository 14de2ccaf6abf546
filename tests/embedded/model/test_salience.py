"""The inputs of products that a bfloat16 model reads as pairs: which they are, what that gives."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.embedded.tiny import VOCAB, random_prompt, write_tiny_model
from tinkercloud.embedded.forward.kv_blocks import BlockPool, kv_layout_of
from tinkercloud.embedded.model import packed_tensors, salience
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.packed_tensors import NUM_SALIENT, PackedTensors
from tinkercloud.embedded.model.salience import salient_inputs
from tinkercloud.embedded.native.bindings import NativeModel
from tinkercloud.embedded.native.compiler import library
from tinkercloud.embedded.native.layered_pass import LayeredPass, Rows
from tinkercloud.embedded.native.packed import KEYS, PackedMatrix, PackedWeights, unpack
from tinkercloud.embedded.native.team import Team
from tinkercloud.embedded.training.trainable_model import frozen

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

NUM_ROWS = 32


@pytest.fixture
def base(tmp_path: Path) -> BaseModel:
    folder = write_tiny_model(tmp_path)
    return BaseModel.load("tiny", folder, None, torch.bfloat16, torch.device("cpu"))


@pytest.fixture
def team() -> Iterator[Team]:
    made = Team(2)
    yield made
    made.end()


def pack_weights(weights: Mapping[str, Tensor]) -> PackedWeights:
    return PackedTensors.of(weights.items()).packed


def layered_pass(team: Team, base: BaseModel, weights: PackedWeights) -> LayeredPass:
    """Over one sequence."""
    config = base.config
    pool = BlockPool(config, weights.dtype, base.device, 2, kv_layout_of(weights.dtype))
    model = NativeModel(config, weights, pool.keys, pool.values)
    tokens, positions = np.array(random_prompt(NUM_ROWS, 0)), np.arange(NUM_ROWS, dtype=np.int32)
    rows = Rows(tokens, positions, np.zeros_like(positions), np.arange(2, dtype=np.int32)[None])
    rotary = base.architecture.rotary(torch.arange(NUM_ROWS))
    return LayeredPass(model, rows, rotary, [], lambda: nullcontext(team))


def logits(team: Team, base: BaseModel, weights: PackedWeights) -> Tensor:
    """(NUM_ROWS, V)."""
    layers, config = layered_pass(team, base, weights), base.config
    x, hidden = layers.embed(), torch.empty(NUM_ROWS, config.hidden_size)
    for index in range(config.num_layers):
        is_last = index + 1 == config.num_layers
        layers.layer(index, x, keep=False, hidden=hidden if is_last else None)
    return head_logits(layers, hidden)


def head_logits(layers: LayeredPass, hidden: Tensor) -> Tensor:
    out = torch.empty(NUM_ROWS, VOCAB)
    layers.logits(hidden, np.arange(NUM_ROWS), out)
    return out


def modules(base: BaseModel) -> dict[str, int]:
    """Inputs by name."""
    names = [name for name in base.weights if name.endswith("_proj")]
    return {name: base.weights[name].shape[1] for name in (*names, "lm_head")}


def test_the_inputs_whose_rounding_does_most_harm_are_chosen(
    team: Team, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large norm makes an input large, a large column its error."""
    monkeypatch.setattr(salience, "NUM_SALIENT", 4)
    path, weights = "model.layers.1", dict(base.weights)
    weights[f"{path}.input_layernorm"][[3, 40]] *= 50
    for leaf in "qkv":
        weights[f"{path}.self_attn.{leaf}_proj"][:, [0, 17]] *= 50
    weights[f"{path}.mlp.down_proj"][:, [5, 6, 7, 95]] *= 50
    weights["lm_head"][:, [1, 2, 30, 31]] *= 50
    chosen = salient_inputs(team, base.architecture, pack_weights(weights))
    keys = {f"model.layers.{layer}.{KEYS}" for layer in range(base.config.num_layers)}
    assert chosen.keys() == modules(base).keys() | keys
    for leaf in "qkv":
        assert chosen[f"{path}.self_attn.{leaf}_proj"].tolist() == [0, 3, 17, 40]
    assert chosen[f"{path}.mlp.down_proj"].tolist() == [5, 6, 7, 95]
    assert chosen["lm_head"].tolist() == [1, 2, 30, 31]


def test_modules_that_read_the_same_rows_have_the_same_ascending_inputs(
    team: Team, base: BaseModel
) -> None:
    chosen = salient_inputs(team, base.architecture, pack_weights(base.weights))
    for name, num_inputs in modules(base).items():
        assert len(chosen[name]) == min(num_inputs, NUM_SALIENT)
        assert bool((chosen[name].diff() > 0).all())
    for layer in range(base.config.num_layers):
        path = f"model.layers.{layer}"
        assert_same([chosen[f"{path}.self_attn.{leaf}_proj"] for leaf in "qkv"])
        assert_same([chosen[f"{path}.mlp.{leaf}_proj"] for leaf in ("gate", "up")])


def assert_same(tensors: list[Tensor]) -> None:
    assert all(torch.equal(tensors[0], other) for other in tensors)


def test_the_choice_does_not_depend_on_the_number_of_threads(base: BaseModel) -> None:
    choices: list[Mapping[str, Tensor]] = []
    for num_threads in (1, 3):
        team = Team(num_threads)
        choices.append(salient_inputs(team, base.architecture, pack_weights(base.weights)))
        team.end()
    for name in modules(base):
        assert_same([choice[name] for choice in choices])


def test_a_product_reads_salient_inputs_with_their_errors(team: Team, base: BaseModel) -> None:
    weights = pack_weights(base.weights)
    numbers = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_ROWS, base.config.hidden_size, generator=numbers)
    rounded = hidden.bfloat16().double()
    error = (hidden - hidden.bfloat16().float()).bfloat16().double()
    for salient in ([], [0, 1, 5, 46, 47], list(range(8, 40))):
        inputs = torch.tensor(salient, dtype=torch.int64)
        own = weights.with_salient(dict.fromkeys(modules(base), inputs))
        read = rounded.clone()
        read[:, inputs] += error[:, inputs]
        exact = read @ base.weights["lm_head"].double().T
        found = head_logits(layered_pass(team, base, own), hidden)
        assert float((found - exact).abs().max()) < 1e-6 * float(exact.abs().max()), salient


def test_the_more_inputs_are_salient_the_nearer_the_pass_is_to_float32(
    team: Team, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32: on the same rounded weights."""
    monkeypatch.setattr(packed_tensors, "NUM_SALIENT", 96)
    wide = pack_weights({name: weight.float() for name, weight in base.weights.items()})
    exact, plain = logits(team, base, wide), pack_weights(base.weights)
    distances: list[float] = []
    for size in (0, 32, 96):
        inputs = {name: torch.arange(min(size, count)) for name, count in modules(base).items()}
        found = logits(team, base, plain.with_salient(inputs))
        distances.append(float((found - exact).abs().mean()))
    assert distances[1] < 0.9 * distances[0], distances
    assert distances[2] < 0.5 * distances[0], distances


def test_trained_weights_keep_the_salient_inputs_of_their_base(team: Team, base: BaseModel) -> None:
    trained = {name: weight.roll(1, dims=-1) for name, weight in base.weights.items()}
    version = frozen(base, trained)
    assert isinstance(base.weights, PackedTensors)
    assert isinstance(version, PackedTensors)
    assert version.salient_inputs.keys() == base.weights.salient_inputs.keys()
    for name, inputs in base.weights.salient_inputs.items():
        assert torch.equal(version.salient_inputs[name], inputs)
        if name.endswith(KEYS):
            continue
        matrix, (num_outputs, num_inputs) = version.packed.matrices[name], trained[name].shape
        whole = PackedMatrix(matrix.packed, (num_outputs, matrix.width))
        again = -(-num_inputs // 32) * 32 + torch.arange(len(inputs))
        assert torch.equal(unpack(team, whole)[:, again], trained[name][:, inputs])


def test_errors_are_kept_of_the_dimensions_of_keys_that_do_most_harm(
    team: Team, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each head its own. What a key's error does is in proportion to the query too."""
    monkeypatch.setattr(salience, "num_key_errors", lambda head_dim, dtype: min(4, head_dim))
    path, weights = "model.layers.1.self_attn", dict(base.weights)
    config = base.config
    size, group = config.head_dim, config.num_heads // config.num_kv_heads
    for head in range(config.num_kv_heads):
        for dim in (head, head + size // 2):  # which are rotated together
            weights[f"{path}.k_proj"][head * size + dim] *= 30
        dim = head + 2
        for at in (dim, dim + size // 2):
            weights[f"{path}.q_proj"][head * group * size + at] *= 1000
    chosen = salient_inputs(team, base.architecture, pack_weights(weights))
    for head, dims in enumerate(chosen[f"{path}.keys"].tolist()):
        half = size // 2
        assert dims == [head, head + 2, head + half, head + 2 + half]
