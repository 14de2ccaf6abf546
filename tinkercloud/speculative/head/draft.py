"""Drafting with a head: chains of tokens drawn with the target's own noise.

The target's token of position t is argmax_x log p_t(x) + g(t, x), and what is drafted
argmax_x log q_t(x) + g(t, x) with the same g: where the distributions are close the two
are nearly always one token (Gumbel coupling, Daliri et al. 2408.07978). The target's warping and
noise are passed in by whoever draws the target's tokens, so that both draw alike.

Axes: B sequences, K drafted tokens, D hidden, Vd draft vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from tinkercloud.speculative.device_copy import to_device
from tinkercloud.speculative.drafters.draft_distribution import DraftDistribution
from tinkercloud.speculative.head.cache import HeadCache, NewRows, extend
from tinkercloud.speculative.head.head import Head, Params
from tinkercloud.speculative.head.vocabulary import DraftVocabulary


class Row(Protocol):
    """What one token is drawn with: all that this file needs of the sampler's own type."""

    @property
    def is_greedy(self) -> bool: ...


RowT = TypeVar("RowT", bound=Row)


@dataclass(frozen=True, slots=True)
class Coupling(Generic[RowT]):
    """How the target draws. warp: logits (B, Vd), rows -> log-weights (B, Vd) after temperature,
    top-k and top-p. noise: rows, token ids int64 (Vd,) -> the Gumbel noise of those tokens,
    float32 (B, Vd), at the rows' positions."""

    warp: Callable[[Tensor, Sequence[RowT]], Tensor]
    noise: Callable[[Sequence[RowT], Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Start(Generic[RowT]):
    """Where chains begin. output (B, D): the block's output of each sequence's last row.
    rows[k][b]: what the k-th token of chain b is drawn with. audited: chains whose
    distributions are wanted."""

    slots: Sequence[int]
    output: Tensor
    rows: Sequence[Sequence[RowT]]
    audited: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Chains:
    """tokens int64 (B, K), ids of the target; chances float32 (B, K): what the draft gave each.
    distributions: by audited chain, what each of its K tokens was drawn from."""

    tokens: Tensor
    chances: Tensor
    distributions: Mapping[int, Sequence[DraftDistribution]]


@dataclass(frozen=True, slots=True)
class Drawn:
    """tokens int64 (B,), as the target numbers them. probs (B, Vd): the draft's distribution
    over its own vocabulary; chances (B,): what it gave the tokens."""

    tokens: Tensor
    chances: Tensor
    probs: Tensor


@torch.no_grad()
def draw(
    logits: Tensor, rows: Sequence[RowT], vocabulary: DraftVocabulary, coupling: Coupling[RowT]
) -> Drawn:
    """The draft's token of each row of logits (B, Vd). Ties go to the lowest id, as with the
    target."""
    weights = coupling.warp(logits, rows)
    scored = weights
    if not all(row.is_greedy for row in rows):
        noise = coupling.noise(rows, vocabulary.ids).to(weights.device)
        hot = to_device(torch.tensor([not row.is_greedy for row in rows]), weights.device)
        scored = torch.where(hot[:, None], weights + noise, weights)
    places = torch.arange(scored.shape[-1], device=scored.device)
    highest = scored == scored.amax(-1, keepdim=True)
    best = torch.where(highest, places, len(vocabulary)).amin(-1)  # argmax leaves ties open
    probs = torch.softmax(weights, -1)
    chances = probs.gather(-1, best[:, None])[:, 0]
    return Drawn(vocabulary.ids.to(best.device)[best], chances, probs)


@torch.no_grad()
def draft_chains(
    head: Head, params: Params, cache: HeadCache, start: Start[RowT], coupling: Coupling[RowT]
) -> Chains:
    """K = len(start.rows) tokens for each sequence. The cache is left as it was found: after the
    target's verdict the rows come again, with the target's features."""
    lengths = [cache.lengths[slot] for slot in start.slots]
    vocabulary, output, tokens, chances = head.vocabulary, start.output, [], []
    distributions: dict[int, list[DraftDistribution]] = {b: [] for b in start.audited}
    for step, rows in enumerate(start.rows):
        drawn = draw(head.logits(params, output), rows, vocabulary, coupling)
        tokens.append(drawn.tokens)
        chances.append(drawn.chances)
        for b, chain in distributions.items():
            chain.append(DraftDistribution.of(drawn.probs[b], vocabulary.ids))
        if step + 1 < len(start.rows):
            before, token = output[:, None], drawn.tokens[:, None]
            new = NewRows(start.slots, before, token, [1] * len(start.slots))
            output = extend(head, params, cache, new)[:, 0]
    for slot, length in zip(start.slots, lengths, strict=True):
        cache.rewind(slot, length)
    return Chains(torch.stack(tokens, -1), torch.stack(chances, -1), distributions)
