"""Losses of a draft against their definitions, finite differences and the optimum they promise."""

import pytest
import torch
from torch import Tensor

from tinkercloud.speculative.head import losses
from tinkercloud.speculative.head.losses import MEASURES, Teacher, distances

N, V, M = 6, 17, 4
T = 0.7


def logits_and_target(seed: int) -> tuple[Tensor, Tensor]:
    """Logits of a draft, and a target's distribution, float64."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(N, V, generator=generator, dtype=torch.float64) * 2
    p = torch.softmax(torch.randn(N, V, generator=generator, dtype=torch.float64) * 2, -1)
    return z, p


def defined(name: str, q: Tensor, p: Tensor) -> Tensor:
    """Each loss as it is defined, for autograd."""
    kl = (p * (p / q).log()).sum(-1)
    distance = 1 - torch.minimum(p, q).sum(-1)
    if name == "lk":
        share = torch.exp(-losses.LK_DECAY * (1 - distance)).detach()
        return share * kl + (1 - share) * distance
    reverse = (q * (q / p).log()).sum(-1)
    return {"forward_kl": kl, "reverse_kl": reverse, "total_variation": distance}[name]


@pytest.mark.parametrize("name", MEASURES)
def test_gradients_are_those_of_the_definition(name):
    z, p = logits_and_target(0)
    rows, gradient = MEASURES[name](z, p)
    leaf = z.clone().requires_grad_()
    slow = defined(name, torch.softmax(leaf, -1), p)
    (expected,) = torch.autograd.grad(slow.sum(), leaf)
    torch.testing.assert_close(rows, slow.detach())
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("name", [n for n in MEASURES if n != "lk"])  # its lambda is a constant
def test_gradients_are_those_of_finite_differences(name):
    z, p = logits_and_target(1)
    _, gradient = MEASURES[name](z, p)
    step = 1e-6
    for x in range(V):
        moved = torch.zeros_like(z)
        moved[:, x] = step
        slope = (MEASURES[name](z + moved, p)[0] - MEASURES[name](z - moved, p)[0]) / (2 * step)
        torch.testing.assert_close(gradient[:, x], slope, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", MEASURES)
def test_the_optimum_is_the_targets_distribution(name):
    z, p = logits_and_target(2)
    at, gradient = MEASURES[name](p.log(), p)
    assert at.abs().max() < 1e-12
    if name in ("forward_kl", "reverse_kl"):  # the others have a corner there
        assert gradient.abs().max() < 1e-6
    for scale in (1e-3, 0.1, 1.0):
        assert (MEASURES[name](p.log() + scale * z, p)[0] > at).all()


@pytest.mark.parametrize("name", MEASURES)
def test_the_optimum_on_a_trimmed_vocabulary_is_the_rest_of_the_target_renormalised(name):
    z, p = logits_and_target(3)
    kept, z = p[:, :9], z[:, :9]
    best = MEASURES[name](kept.log(), kept)[0]
    for scale in (0.01, 0.1, 1.0):
        assert (MEASURES[name](kept.log() + scale * z, kept)[0] >= best - 1e-12).all()


@pytest.mark.parametrize("name", MEASURES)
def test_what_the_target_cannot_draw_leaves_everything_finite(name):
    z, p = logits_and_target(4)
    p[:, ::2] = 0
    p /= p.sum(-1, keepdim=True)
    z[:, 3] = -torch.inf
    rows, gradient = MEASURES[name](z, torch.where(z == -torch.inf, 0.0, p))
    assert torch.isfinite(rows).all()
    assert torch.isfinite(gradient).all()


# ---- a teacher of the most probable tokens


def with_rest(z: Tensor, p: Tensor) -> Tensor:
    return distances(z, losses.most_probable(p, M), 1.0, losses.forward_kl)


def without_rest(z: Tensor, p: Tensor) -> Tensor:
    """What is often done: the same sum over the most probable tokens alone."""
    probs, ids = p.topk(M, -1)
    log_q = torch.log_softmax(z, -1).gather(-1, ids)
    return (probs * (probs.log() - log_q)).sum(-1)


def gradient_at_the_target(loss) -> float:
    p = logits_and_target(5)[1].float()
    z = p.log().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(z, p).sum(), z)
    return float(gradient.abs().max())


def test_the_optimum_of_some_tokens_and_the_rest_is_the_targets_law():
    assert gradient_at_the_target(with_rest) < 1e-6


def test_without_the_rest_the_optimum_is_elsewhere():
    assert gradient_at_the_target(without_rest) > 1e-2
    p = logits_and_target(5)[1].float()
    ids = p.topk(M, -1).indices
    louder = p.log().scatter_add(-1, ids, torch.full((N, M), 2.0))  # too sure of the told ones
    assert (without_rest(louder, p) < without_rest(p.log(), p)).all()
    assert (with_rest(louder, p) > with_rest(p.log(), p)).all()


@pytest.mark.parametrize("name", MEASURES)
def test_some_tokens_are_a_lower_bound_of_all(name):
    z, p = (x.float() for x in logits_and_target(6))
    whole = distances(z, Teacher(p), T, MEASURES[name])
    told = distances(z, losses.most_probable(p, M), T, MEASURES[name])
    if name != "lk":  # whose lambda differs
        assert (told <= whole + 1e-6).all()
    almost = distances(z, losses.most_probable(p, V - 1), T, MEASURES[name])
    torch.testing.assert_close(almost, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MEASURES)
def test_gradients_through_the_temperature_and_the_rest_are_those_of_autograd(name):
    z, p = (x.float() for x in logits_and_target(7))
    temperature = torch.tensor([0.5, 0.7, 1.0, 1.3, 1.0, 2.0])
    teacher = losses.most_probable(p, M)
    leaf = z.clone().requires_grad_()
    q = torch.softmax(leaf / temperature[:, None], -1)
    told = q.gather(-1, teacher.ids)
    outcomes = torch.cat((told, 1 - told.sum(-1, keepdim=True)), -1)
    law = torch.cat((teacher.probs, teacher.rest[:, None]), -1)
    (expected,) = torch.autograd.grad(defined(name, outcomes, law).sum(), leaf)
    other = z.clone().requires_grad_()
    rows = distances(other, teacher, temperature, MEASURES[name])
    (gradient,) = torch.autograd.grad(rows.sum(), other)
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-5)


def test_the_drafted_token_is_always_told():
    _, p = logits_and_target(8)
    worst = p.argmin(-1)
    teacher = losses.most_probable(p, M, drafted=worst)
    assert (teacher.ids == worst[:, None]).any(-1).all()
    torch.testing.assert_close(teacher.probs.sum(-1) + teacher.rest, torch.ones(N).double())
    best = p.argmax(-1)
    same = losses.most_probable(p, M, drafted=best)
    assert all(len(set(row)) == M for row in same.ids.tolist())


def test_tokens_that_the_draft_lacks_are_nobodys():
    _, p = logits_and_target(9)
    index = torch.full((V,), -1)
    index[:8] = torch.arange(8)
    teacher = losses.on_vocabulary(losses.most_probable(p, M), index)
    assert ((teacher.ids >= 0) == (teacher.probs > 0)).all()
    z = torch.randn(N, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (gradient,) = torch.autograd.grad(distances(z, teacher, 1.0, losses.forward_kl).sum(), z)
    assert torch.isfinite(gradient).all()
    assert gradient.abs().max() > 0


def test_the_target_learns_nothing():
    z, p = (x.float() for x in logits_and_target(10))
    p.requires_grad_()
    z.requires_grad_()
    distances(z, Teacher(p), 1.0, losses.forward_kl).sum().backward()
    assert p.grad is None
    assert z.grad is not None
    assert z.grad.abs().max() > 0


def test_rows_count_by_their_weights():
    rows, weights = torch.tensor([1.0, 5.0, 9.0]), torch.tensor([1.0, 0.0, 3.0])
    assert float(losses.weighted_mean(rows, weights)) == pytest.approx(7.0)
    assert float(losses.weighted_mean(rows, torch.zeros(3))) == 0.0


def test_expected_acceptance_is_one_less_the_total_variation():
    z, p = (x.float() for x in logits_and_target(11))
    whole = losses.expected_acceptance(z, Teacher(p), T)
    torch.testing.assert_close(whole, 1 - losses.total_variation(z / T, p)[0])
    told = losses.expected_acceptance(z, losses.most_probable(p, M), T)
    assert (told <= whole + 1e-6).all()
    assert (told > 0).all()
