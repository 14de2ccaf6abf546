"""The gradient of linear modules and their adapters: that of autograd, whoever else is there."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tinkercloud.embedded.native import train_bindings
from tinkercloud.embedded.native.bindings import log_sum_exp
from tinkercloud.embedded.native.compiler import library
from tinkercloud.embedded.native.linear_gradient import (
    AdaptedRows,
    Factors,
    Gates,
    Outputs,
    TargetGradients,
    linear_gradient,
)
from tinkercloud.embedded.native.packed import pack, product
from tinkercloud.embedded.native.team import Team

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

PRECISION = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
SCALE = 0.7
# Rows, inputs, outputs of each module, rank. One, odd ones, more outputs than are taken at once.
SHAPES = (
    (1, 1, (1,), 1),
    (9, 3, (7,), 2),
    (70, 48, (48, 16, 16), 4),
    (67, 75, (30, 41), 5),
    (130, 576, (576, 192, 192), 32),
    (33, 64, (1536, 1536), 17),
    (40, 20, (3000, 3000, 50), 3),
    (37, 40, (9001,), 8),
)
Shape = tuple[int, int, tuple[int, ...], int]


@dataclass
class Case:
    """dy has two columns more than modules put out."""

    weights: list[Tensor]
    x: Tensor
    dy: Tensor
    rank: int

    def columns(self) -> list[slice]:
        ends = torch.tensor([0, *(len(w) for w in self.weights)]).cumsum(0).tolist()
        return [slice(a, b) for a, b in pairwise(ends)]

    def factors(self, seed: int) -> list[Factors]:
        generator = torch.Generator().manual_seed(seed)
        pairs = [
            (
                torch.randn(self.rank, w.shape[1], generator=generator),
                torch.randn(w.shape[0], self.rank, generator=generator),
            )
            for w in self.weights
        ]
        return [Factors(a, b, torch.zeros_like(a), torch.zeros_like(b)) for a, b in pairs]

    def gradient(
        self,
        team: Team,
        segments: Sequence[tuple[int, int, Sequence[Factors | None]]],
        **how: bool,
    ) -> Tensor | None:
        matrices = [pack(team, weight) for weight in self.weights]
        outputs = Outputs(matrices, self.dy, [span.start for span in self.columns()])
        adapted = [AdaptedRows(first, num, self.rank, SCALE, f) for first, num, f in segments]
        return linear_gradient(team, self.x, outputs, adapted, **how)


def case(shape: Shape, dtype: torch.dtype) -> Case:
    rows, size, outs, rank = shape
    torch.manual_seed(rows)
    weights = [torch.randn(out, size).to(dtype) for out in outs]
    return Case(weights, torch.randn(rows, size), torch.randn(rows, sum(outs) + 2), rank)


def by_autograd(
    given: Case, segments: Sequence[tuple[int, int, Sequence[Factors | None]]]
) -> tuple[Tensor, list[list[tuple[Tensor, Tensor] | None]]]:
    """dx, and dA and dB of each segment's modules, in float64."""
    x = given.x.double().requires_grad_()
    leaves, loss = [], x.new_zeros(())
    for weight, span in zip(given.weights, given.columns(), strict=True):
        loss = loss + (x @ weight.double().T * given.dy[:, span].double()).sum()
    for first, num, factors in segments:
        rows = x[first : first + num]
        of_segment = []
        for module, span in zip(factors, given.columns(), strict=True):
            if module is None:
                of_segment.append(None)
                continue
            a, b = (f.double().requires_grad_() for f in (module.a, module.b))
            y = SCALE * rows @ a.T @ b.T
            loss = loss + (y * given.dy[first : first + num, span].double()).sum()
            of_segment.append((a, b))
        leaves.append(of_segment)
    loss.backward()
    gradients = [[None if pair is None else (pair[0].grad, pair[1].grad) for pair in of_segment]
                 for of_segment in leaves]  # fmt: skip
    return x.grad, gradients


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = float((found.double() - expected).abs().max())
    assert error <= PRECISION[dtype] * float(expected.abs().max()) + 1e-9


def some_segments(given: Case) -> list[tuple[int, int, list[Factors | None]]]:
    """Rows before, between and after them have no adapter; the last one has none on a module."""
    rows = len(given.x)
    if rows < 9:
        return [(0, rows, given.factors(1))]
    lone = [None if i == 1 else f for i, f in enumerate(given.factors(2))]
    second = rows // 2 + 3
    return [(2, rows // 2, given.factors(1)), (second, rows - second - 1, lone)]


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_autograd(team: Team, shape: Shape, dtype: torch.dtype) -> None:
    given = case(shape, dtype)
    segments = some_segments(given)
    expected, of_factors = by_autograd(given, segments)
    dx = given.gradient(team, segments)
    assert dx is not None
    assert_near(dx, expected, dtype)
    for (_, _, factors), gradients in zip(segments, of_factors, strict=True):
        for module, pair in zip(factors, gradients, strict=True):
            if module is not None and pair is not None:
                assert_near(module.da, pair[0], dtype)
                assert_near(module.db, pair[1], dtype)


def test_gradients_of_adapters_are_added_to_what_is_there(team: Team, dtype: torch.dtype) -> None:
    given = case((70, 48, (48, 16, 16), 4), dtype)
    factors, once = given.factors(1), given.factors(1)
    given.gradient(team, [(0, 70, once)])
    given.gradient(team, [(0, 70, factors)])
    assert given.gradient(team, [(0, 70, factors)], wants_dx=False) is None
    for twice, single in zip(factors, once, strict=True):
        assert torch.equal(twice.da, 2 * single.da)
        assert torch.equal(twice.db, 2 * single.db)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_segment_has_the_same_bits_in_any_company(
    team: Team, shape: Shape, dtype: torch.dtype
) -> None:
    given = case(shape, dtype)
    rows = len(given.x)
    first, num = rows // 3, rows - rows // 3
    alone = Case(given.weights, given.x[first:].contiguous(), given.dy[first:], given.rank)
    ours, theirs = given.factors(1), given.factors(1)
    before = [(0, first, given.factors(2))] if first else []
    together = given.gradient(team, [*before, (first, num, ours)])
    separate = alone.gradient(team, [(0, num, theirs)])
    assert together is not None
    assert separate is not None
    assert torch.equal(together[first:], separate)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.da, other.da)
        assert torch.equal(mine.db, other.db)


def test_threads_change_no_bit(team: Team, dtype: torch.dtype) -> None:
    given, found = case((130, 576, (576, 192, 192), 32), dtype), []
    alone = Team(1)
    for each in (alone, team):
        factors = given.factors(1)
        found.append((given.gradient(each, [(5, 100, factors)]), factors))
    alone.end()
    assert torch.equal(found[0][0], found[1][0])
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(one.da, other.da)
        assert torch.equal(one.db, other.db)


def test_a_gradient_is_the_product_with_the_transposed_weights_to_the_last_bit(
    team: Team, dtype: torch.dtype
) -> None:
    given = case((5, 520, (4000,), 1), dtype)
    transposed = pack(team, given.weights[0].T.contiguous())
    expected = product(team, given.dy[:, :4000].contiguous(), transposed)
    found = given.gradient(team, [])
    assert found is not None
    assert torch.equal(found, expected)


@pytest.mark.parametrize("vocab", [5, 300, 9001])
def test_the_gradient_of_log_probabilities_is_that_of_autograd(
    team: Team, vocab: int, dtype: torch.dtype
) -> None:
    """Rows without a target, with one, and with one twice; of logits and of probabilities."""
    given = case((19, 24, (vocab,), 3), dtype)
    logits = given.dy[:, :vocab] * 4
    rows = torch.tensor([0, 1, 1, 1, 4, 18])
    ids = torch.tensor([vocab - 1, 0, 2, 2, 1, vocab // 2])
    gradients = torch.randn(len(rows))
    wide = logits.double().requires_grad_()
    loss = (wide.log_softmax(-1)[rows, ids] * gradients.double()).sum()
    [given.dy] = torch.autograd.grad(loss, wide)
    segments = [(1, 18, given.factors(1))]
    expected, ((pair,),) = by_autograd(given, segments)
    norms = log_sum_exp(team, logits)
    probabilities = logits.clone()
    train_bindings.to_probabilities_(probabilities, norms)
    found = []
    for source, known in ((logits, norms), (probabilities, None)):
        matrices = [pack(team, given.weights[0])]
        outputs = Outputs(matrices, source, [0], TargetGradients(known, rows, ids, gradients))
        [factors] = given.factors(1)
        adapted = [AdaptedRows(1, 18, given.rank, SCALE, [factors])]
        dx = linear_gradient(team, given.x, outputs, adapted)
        found.append((dx, factors.da, factors.db))
    assert pair is not None
    for ours, theirs in zip(found[0], (expected, *pair), strict=True):
        assert_near(ours, theirs, dtype)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [3, 530, 5000])
def test_gates_are_computed_again_where_they_are_read(
    team: Team, width: int, activation: str, dtype: torch.dtype
) -> None:
    """By `down`, which has read their product, and for the gradient of gate and up."""
    torch.manual_seed(width)
    rows, size, rank = 41, 24, 3
    gates, dproduct = torch.randn(rows, 2 * width).to(dtype), torch.randn(rows, width)
    dense_x, dense_dy = (
        train_bindings.gated(activation, gates),
        train_bindings.gated_gradient(activation, gates, dproduct),
    )
    down = Case([torch.randn(size, width).to(dtype)], dense_x, torch.randn(rows, size), rank)
    both = Case([torch.randn(width, size).to(dtype) for _ in range(2)], torch.randn(rows, size),
                dense_dy, rank)  # fmt: skip
    for given, x, dy, through in (
        (down, Gates(gates, activation), down.dy, None),
        (both, both.x, dproduct, Gates(gates, activation)),
    ):
        dense, factors = given.factors(1), given.factors(1)
        expected = given.gradient(team, [(4, 30, dense)])
        matrices = [pack(team, weight) for weight in given.weights]
        outputs = Outputs(matrices, dy, [0] * len(matrices), gates=through)
        found = linear_gradient(team, x, outputs, [AdaptedRows(4, 30, rank, SCALE, factors)])
        assert torch.equal(found, expected)
        for ours, theirs in zip(factors, dense, strict=True):
            assert torch.equal(ours.da, theirs.da)
            assert torch.equal(ours.db, theirs.db)
