"""The compiled gradient of attention against autograd in float64."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.embedded.native.near import assert_near
from tinkercloud.architectures.blocks import Scoring
from tinkercloud.embedded.native.attention_gradient import Entries, attention_gradient
from tinkercloud.embedded.native.compiler import library

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

SCORINGS = ((0.0, 0), (0.0, 7), (1.5, 0), (1.5, 40))  # caps and windows


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


Shape = tuple[int, int, int, int, int]


def sequences(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """shape: B, L, Hq, Hkv, Dh. q, k, v (B, H, L, Dh) as the columns of one matrix, and the
    gradient of what comes out."""
    batch, length, heads, kv_heads, size = shape
    both = torch.randn(batch, length, heads + 2 * kv_heads, size).to(dtype)
    parts = both.split([heads, kv_heads, kv_heads], dim=2)
    q, k, v = (part.transpose(1, 2) for part in parts)
    return q, k, v, torch.randn(batch, length, heads, size).transpose(1, 2)


def entries_of(lengths: Sequence[int]) -> Entries:
    """Of sequences that share no row."""
    rows = np.arange(sum(lengths))
    return Entries(np.cumsum([0, *lengths]), rows, rows, None)


def gradient(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scoring: Scoring) -> list[Tensor]:
    """As `attention_by_autograd`."""
    batch, _, length, _ = q.shape
    q, k, v, dout = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v, dout))
    dq, dk, dv = (torch.full(x.shape, torch.nan) for x in (q, k, v))
    attention_gradient((q, k, v, dout), entries_of([length] * batch), scoring, (dq, dk, dv))
    return [x.unflatten(0, (batch, length)).transpose(1, 2) for x in (dq, dk, dv)]


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
    for found, expected in zip(gradient(*given), attention_by_autograd(*given), strict=True):
        assert_near(found, expected, dtype)


def test_large_scores_leave_the_gradient_of_attention_finite(dtype: torch.dtype) -> None:
    q, k, v, dout = sequences((1, 50, 2, 1, 16), dtype)
    given = ((q * 100).to(dtype), (k * 100).to(dtype), v, dout, Scoring(16**-0.5))
    for found, expected in zip(gradient(*given), attention_by_autograd(*given), strict=True):
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
            found.append(gradient(*given, scoring))
            found.append(gradient(*(x[4:5] for x in given), scoring))
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
    by_pairs = gradient(*given)
    form_of_pairs(1)
    for widened, expected in zip(gradient(*given), by_pairs, strict=True):
        assert torch.equal(widened, expected)


def test_sequences_of_all_lengths_have_the_gradients_that_they_have_alone(
    dtype: torch.dtype,
) -> None:
    """To the bit, wherever their rows lie, and with gaps between the gradients' rows."""
    lengths, scoring = (1, 36, 150, 7, 70), Scoring(16**-0.5, 1.5, 40)
    whole = sequences((1, sum(lengths), 6, 2, 16), dtype)
    order = torch.randperm(sum(lengths))
    inputs = q, k, v, dout = tuple(x.transpose(1, 2)[0] for x in whole)
    together = torch.full((len(q), 6 + 2 + 2, 16), torch.nan)
    dq, dk, dv = together.split([6, 2, 2], dim=1)
    scattered = tuple(torch.empty_like(x).index_copy_(0, order, x) for x in inputs)
    places, out = order.numpy(), np.arange(sum(lengths))
    starts = np.cumsum([0, *lengths])
    attention_gradient(scattered, Entries(starts, places, out, None), scoring, (dq, dk, dv))
    for first, end in itertools.pairwise(starts):
        alone = tuple(x[first:end].transpose(0, 1)[None] for x in (q, k, v, dout))
        for expected, found in zip(gradient(*alone, scoring), (dq, dk, dv), strict=True):
            assert torch.equal(expected[0].transpose(0, 1), found[first:end])


def test_an_entry_that_is_not_the_owner_of_its_row_has_no_gradient_of_the_result(
    dtype: torch.dtype,
) -> None:
    q, k, v, dout = sequences((1, 40, 6, 2, 16), dtype)
    owned = np.arange(40) >= 16
    masked = dout * torch.from_numpy(owned)[:, None]
    expected = gradient(q, k, v, masked, Scoring(0.25))
    rows = tuple(x.transpose(1, 2)[0] for x in (q, k, v, dout))
    dq, dk, dv = (torch.full(x.shape, torch.nan) for x in rows[:3])
    entries = entries_of([40])
    masking = Entries(entries.starts, entries.rows, entries.out_rows, owned)
    attention_gradient(rows, masking, Scoring(0.25), (dq, dk, dv))
    for found, right in zip((dq, dk, dv), expected, strict=True):
        assert torch.equal(found, right[0].transpose(0, 1))
