"""What a draft's training minimizes: a distance of its distribution from the target's.

Every measure takes the draft's scaled logits z = logits / T and the target's distribution p at the
sampling temperature, and gives a loss for each row with its gradient in z in closed form;
q = softmax(z). The target is a constant: no gradient reaches it. p may sum to less than 1, when the
draft's vocabulary is a part of the target's: the optimum is then p / sum(p).

Axes: N rows, V vocabulary of the draft, M most probable tokens of a target.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Measure = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""z (N, V), p (N, V) -> loss (N,), its gradient in z (N, V)."""

MIN_PROB = 1e-9  # of the target in reverse KL, which would be infinite where it is 0
LK_DECAY = 3.0


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's distribution of each row.

    probs: (N, V); or (N, M) of the tokens `ids` int64 (N, M), each at most once in a row and -1
    where the draft has no such token; `rest` (N,) is then the mass of all others that it has.
    """

    probs: Tensor
    ids: Tensor | None = None
    rest: Tensor | None = None


# ---- measures


def forward_kl(z: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """sum p log(p / q); gradient sum(p) q - p. It covers all that the target may say: for a draft
    that is far off (DistillSpec 2310.08461 compares the divergences)."""
    log_q = torch.log_softmax(z, -1)
    rows = (torch.xlogy(p, p) - _product(p, log_q)).sum(-1)
    return rows, p.sum(-1, keepdim=True) * log_q.exp() - p


def reverse_kl(z: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """sum q log(q / p) = KL; gradient q (log(q / p) - KL). p is at least MIN_PROB."""
    log_q = torch.log_softmax(z, -1)
    q = log_q.exp()
    ratio = torch.where(q > 0, log_q - p.clamp(min=MIN_PROB).log(), 0.0)
    rows = (q * ratio).sum(-1)
    return rows, q * (ratio - rows[:, None])


def total_variation(z: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """1 - alpha, alpha = sum min(p, q): the chance that a drafted token is rejected
    (Leviathan et al. 2211.17192, section 3.2); gradient -q (1[q < p] - sum q 1[q < p]), which
    vanishes where the draft is far off."""
    q = torch.softmax(z, -1)
    below = q * (q < p)
    return 1.0 - torch.minimum(p, q).sum(-1), q * below.sum(-1, keepdim=True) - below


def lk(z: Tensor, p: Tensor, decay: float = LK_DECAY) -> tuple[Tensor, Tensor]:
    """lambda KL + (1 - lambda)(1 - alpha), lambda = exp(-decay alpha), a constant of each row (LK
    losses, 2602.23881): far off it is forward KL, near by the acceptance itself."""
    kl, kl_gradient = forward_kl(z, p)
    distance, gradient = total_variation(z, p)
    share = torch.exp(-decay * (1.0 - distance))
    rows = share * kl + (1.0 - share) * distance
    share = share[:, None]
    return rows, share * kl_gradient + (1.0 - share) * gradient


MEASURES: dict[str, Measure] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
    "lk": lk,
}


def _product(p: Tensor, log_q: Tensor) -> Tensor:
    """p log q, 0 where p is 0, whatever q is."""
    return torch.where(p > 0, p * log_q, 0.0)


# ---- against a teacher


def distances(
    logits: Tensor, teacher: Teacher, temperature: Tensor | float, measure: Measure
) -> Tensor:
    """The loss of every row, (N,), differentiable in the draft's logits (N, V).

    temperature: that of the target's sampling, a number or (N,); 0 counts as 1. With a teacher of M
    tokens the measure compares M + 1 outcomes: those, and "any other". It is then a lower bound of
    the whole measure and has the same optimum on the M; without the last outcome the draft would
    learn to give all other tokens nothing.
    """
    z, p = _outcomes(_scaled(logits, temperature), teacher)
    return _ClosedForm.apply(z, p, measure)  # pyright: ignore[reportReturnType]


def weighted_mean(rows: Tensor, weights: Tensor) -> Tensor:
    """rows, weights (N,) -> one number; 0 where nothing has weight."""
    total = weights.sum()
    return (rows * weights).sum() / torch.where(total > 0, total, 1.0)


@torch.no_grad()
def expected_acceptance(logits: Tensor, teacher: Teacher, temperature: Tensor | float) -> Tensor:
    """alpha = sum min(p, q) of every row, (N,); from M tokens alone it is a lower bound."""
    z, p = _outcomes(_scaled(logits, temperature), teacher)
    both = torch.minimum(torch.softmax(z, -1), p)
    return (both if teacher.ids is None else both[:, :-1]).sum(-1)


def _scaled(logits: Tensor, temperature: Tensor | float) -> Tensor:
    if isinstance(temperature, Tensor):
        return logits.float() / torch.where(temperature == 0, 1.0, temperature)[:, None]
    return logits.float() / (temperature or 1.0)


def _outcomes(z: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """Logits and distribution of what is compared: (N, V), or (N, M + 1) with "any other" last."""
    probs = teacher.probs.detach().float()
    if teacher.ids is None or teacher.rest is None:
        return z, probs
    # One column more, for the ids that the draft does not have.
    padded = torch.nn.functional.pad(z, (0, 1), value=float("-inf"))
    ids = torch.where(teacher.ids < 0, z.shape[-1], teacher.ids)
    others = torch.logsumexp(padded.scatter(-1, ids, float("-inf")), -1, keepdim=True)
    rest = teacher.rest.detach().float()[:, None].clamp(min=0.0)
    return torch.cat((padded.gather(-1, ids), others), -1), torch.cat((probs, rest), -1)


class _ClosedForm(torch.autograd.Function):
    """A measure with its own gradient, so that autograd keeps none of its intermediates."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, p: Tensor, measure: Measure) -> Tensor:
        rows, gradient = measure(z.detach(), p)
        ctx.save_for_backward(gradient)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return grads[0][:, None] * gradient, None, None


# ---- making teachers


def most_probable(p: Tensor, count: int, drafted: Tensor | None = None) -> Teacher:
    """The `count` most probable tokens of p (N, V), and the drafted ones (N,) in place of the last
    of them where they are not among them."""
    probs, ids = p.topk(min(count, p.shape[-1]), -1)
    if drafted is not None:
        missing = (ids != drafted[:, None]).all(-1)
        ids[missing, -1] = drafted[missing]
        probs = p.gather(-1, ids)
    return Teacher(probs, ids, 1.0 - probs.sum(-1))


def on_vocabulary(teacher: Teacher, index: Tensor) -> Teacher:
    """A teacher of M tokens of the target's vocabulary in a draft's; index int64 (target V,): the
    draft's id of each token, -1 where it has none. The mass of such tokens is dropped."""
    if teacher.ids is None:
        raise ValueError("a distribution over all tokens is restricted by indexing it")
    ids = torch.where(teacher.ids < 0, -1, index[teacher.ids.clamp(min=0)])
    return Teacher(teacher.probs * (ids >= 0), ids, teacher.rest)
