"""The compiled parts of a training pass against autograd in float64 and PyTorch's own steps."""

import pytest
import torch

from tests.embedded.native.near import assert_near
from tinkercloud.architectures import layers
from tinkercloud.embedded.native import train_bindings as compiled
from tinkercloud.embedded.native.bindings import log_sum_exp
from tinkercloud.embedded.native.compiler import library
from tinkercloud.embedded.training import rowwise

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

WIDTHS = (1, 24, 64, 513, 1536)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("width", WIDTHS)
def test_norms_are_those_of_the_plain_pass(width: int) -> None:
    x, weight = torch.randn(19, width), torch.randn(width)
    expected, inverse = rowwise.norm(x, weight, 1e-5)
    normed, own_inverse = compiled.norm(x, weight, 1e-5)
    torch.testing.assert_close(own_inverse, inverse)
    assert_near(normed, expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_gradient_of_a_norm_is_that_of_autograd(width: int) -> None:
    x, dy, weight, before = (torch.randn(*s, width) for s in ((19,), (19,), (), (19,)))
    wide = x.double().requires_grad_()
    norm = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    [expected] = torch.autograd.grad(norm, wide, dy.double())
    for rows in (compiled, rowwise):
        _, inverse = rows.norm(x, weight, 1e-5)
        into = before.clone()
        rows.norm_gradient(x, inverse, weight, dy.clone(), into)
        assert_near(into, before.double() + expected)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_gate_and_its_gradient_are_those_of_autograd(
    width: int, activation: str, dtype: torch.dtype
) -> None:
    gates = (torch.randn(19, 2 * width) * 4).to(dtype)
    gates[0] = 100.0
    gates[1] = -100.0
    dy = torch.randn(19, width)
    wide = gates.double().requires_grad_()
    gate, up = wide.chunk(2, dim=1)
    product = layers.gated(activation, gate, up)
    [expected] = torch.autograd.grad(product, wide, dy.double())
    assert_near(compiled.gated(activation, gates), product.detach())
    assert_near(compiled.gated_gradient(activation, gates, dy), expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [1.0, 0.5])
@pytest.mark.parametrize("size", [4, 24, 64, 128])
def test_rows_are_rotated_as_the_plain_pass_rotates_them(
    size: int, rotated: float, interleaved: bool
) -> None:
    both = torch.randn(13, 5, size)
    x, beside = both[:, 1:4], both[:, 4:].clone()
    angles = torch.rand(13, int(size * rotated) // 2) * 6
    expected = layers.rotate(x, angles.cos(), angles.sin(), interleaved=interleaved)
    compiled.rotate_(x, angles.cos(), angles.sin(), interleaved=interleaved)
    assert_near(x, expected)
    assert torch.equal(both[:, 4:], beside)


@pytest.mark.parametrize("width", [1, 17, 512, 5000, 49152])
def test_probabilities_and_their_normalizer_are_those_of_float64(width: int) -> None:
    logits = torch.randn(9, width) * 8
    exact = logits.double()
    with compiled.training_team() as team:
        norms = log_sum_exp(team, logits)
    torch.testing.assert_close(norms, exact.logsumexp(-1), rtol=1e-6, atol=1e-6)
    compiled.to_probabilities_(logits, norms)
    torch.testing.assert_close(logits.double(), exact.softmax(-1), rtol=4e-6, atol=1e-12)
