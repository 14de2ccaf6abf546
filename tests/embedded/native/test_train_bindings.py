"""The compiled parts of a training pass against autograd in float64 and PyTorch's own steps."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tinkercloud.architectures import layers
from tinkercloud.architectures.blocks import Scoring
from tinkercloud.embedded.native import train_bindings as compiled
from tinkercloud.embedded.native.bindings import log_sum_exp
from tinkercloud.embedded.native.compiler import library
from tinkercloud.embedded.training import rowwise

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

PRECISION = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
WIDTHS = (1, 24, 64, 513, 1536)
SCORINGS = ((0.0, 0), (0.0, 7), (1.5, 0), (1.5, 40))  # caps and windows


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def assert_near(found: Tensor, expected: Tensor, read_as: torch.dtype = torch.float32) -> None:
    """Up to rounding in a type: the result's own, or that as which products have read numbers."""
    dtype = found.dtype if read_as == torch.float32 else read_as
    error = float((found.double() - expected.double()).abs().max())
    assert error <= PRECISION[dtype] * float(expected.abs().max()) + 1e-9


Shape = tuple[int, int, int, int, int]


def sequences(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """shape: B, L, Hq, Hkv, Dh. q, k, v (B, H, L, Dh) as the columns of one matrix, and the
    gradient of what comes out."""
    batch, length, heads, kv_heads, size = shape
    both = torch.randn(batch, length, heads + 2 * kv_heads, size).to(dtype)
    parts = both.split([heads, kv_heads, kv_heads], dim=2)
    q, k, v = (part.transpose(1, 2) for part in parts)
    return q, k, v, torch.randn(batch, length, heads, size).transpose(1, 2)


def attention_by_autograd(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scoring: Scoring
) -> tuple[Tensor, ...]:
    given = [x.double().detach().requires_grad_() for x in (q, k, v)]
    own_k, own_v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in given[1:])
    scores = given[0] @ own_k.transpose(2, 3) * scoring.scale
    if scoring.cap:
        scores = scoring.cap * torch.tanh(scores / scoring.cap)
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    seen = seen.triu(1 - (scoring.window or len(seen)))
    out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ own_v
    return torch.autograd.grad(out, given, dout.double())


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1, 8),
        (3, 1, 2, 1, 8),
        (2, 7, 6, 2, 24),
        (1, 65, 4, 4, 64),
        (3, 36, 9, 3, 64),
        (1, 37, 3, 1, 5),
        (5, 100, 9, 3, 80),
        (1, 300, 9, 3, 64),
        (9, 49, 2, 2, 128),
    ],
)
@pytest.mark.parametrize(("cap", "window"), SCORINGS)
def test_the_gradient_of_attention_is_that_of_autograd(
    shape: Shape, cap: float, window: int, dtype: torch.dtype
) -> None:
    scale = shape[4] ** -0.5 * (0.9 if cap or window else 1.0)
    given = (*sequences(shape, dtype), Scoring(scale, cap, window))
    for found, expected in zip(
        compiled.attention_gradient(*given), attention_by_autograd(*given), strict=True
    ):
        assert_near(found, expected, dtype)


def test_large_scores_leave_the_gradient_of_attention_finite(dtype: torch.dtype) -> None:
    q, k, v, dout = sequences((1, 50, 2, 1, 16), dtype)
    given = ((q * 100).to(dtype), (k * 100).to(dtype), v, dout, Scoring(16**-0.5))
    for found, expected in zip(
        compiled.attention_gradient(*given), attention_by_autograd(*given), strict=True
    ):
        assert_near(found, expected, dtype)


def test_a_sequences_gradient_does_not_depend_on_its_company_or_on_threads(
    dtype: torch.dtype,
) -> None:
    """One sequence is shared among threads by heads, twelve by themselves."""
    threads = torch.get_num_threads()
    given = sequences((12, 70, 6, 2, 32), dtype)
    scoring = Scoring(32**-0.5, 1.5, 40)
    found = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            found.append(compiled.attention_gradient(*given, scoring))
            found.append(compiled.attention_gradient(*(x[4:5] for x in given), scoring))
    finally:
        torch.set_num_threads(threads)
    for together, alone in zip(found[::2], found[1::2], strict=True):
        for whole, one, first in zip(together, alone, found[0], strict=True):
            assert torch.equal(whole[4:5], one)
            assert torch.equal(whole, first)


@pytest.mark.parametrize("shape", [(2, 37, 3, 1, 5), (3, 100, 9, 3, 64), (1, 300, 4, 4, 80)])
@pytest.mark.parametrize("scale", [1.0, 2.0**-122], ids=["usual", "some sums below 2^-126"])
def test_both_forms_of_sums_of_pairs_give_attention_the_same_gradient(
    form_of_pairs: Callable[[int], bool], shape: Shape, scale: float
) -> None:
    *narrow, dout = sequences(shape, torch.bfloat16)
    given = (*narrow, dout * scale, Scoring(shape[4] ** -0.5, 1.5, 40))
    if not form_of_pairs(0):
        pytest.skip("the processor multiplies no pairs, or all of them as tiles")
    by_pairs = compiled.attention_gradient(*given)
    form_of_pairs(1)
    for widened, expected in zip(compiled.attention_gradient(*given), by_pairs, strict=True):
        assert torch.equal(widened, expected)


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
