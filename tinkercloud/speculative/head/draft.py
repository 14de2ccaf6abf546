"""Drafting with a head: chains of tokens drawn with the target's own noise.

The target's token of position t is argmax_x log p_t(x) + g(t, x), the drafted one
argmax_x log q_t(x) + g(t, x) with the same g: where the distributions are close the two are nearly
always one token (Gumbel coupling, Daliri et al. 2408.07978).

Axes: B sequences, K drafted tokens, D hidden, Vd draft vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tinkercloud.decoding import device_scan
from tinkercloud.decoding.device_copy import to_device
from tinkercloud.decoding.sampler import RowParams, gumbel_noise_at, lowest_argmax, warp
from tinkercloud.speculative.drafters.draft_distribution import DraftDistribution
from tinkercloud.speculative.head.cache import HeadCache, NewRows, extend
from tinkercloud.speculative.head.head import Head, Params
from tinkercloud.speculative.head.vocabulary import DraftVocabulary


class ChainSteps(Protocol):
    """A head at the ends of B sequences."""

    @property
    def vocabulary(self) -> DraftVocabulary: ...

    def logits(self, output: Tensor) -> Tensor:
        """output (B, D): the block's of each sequence's last row -> (B, Vd)."""
        ...

    def extended(self, output: Tensor, tokens: Tensor) -> Tensor:
        """One more row each, int64 (B,), with these outputs in the features' place: theirs."""
        ...


@dataclass(frozen=True, slots=True)
class ChainStart:
    """Where chains begin. output (B, D): the block's output of each sequence's last row.
    rows[k][b]: what the k-th token of chain b is drawn with. audited: chains whose distributions
    are reported."""

    slots: Sequence[int]
    output: Tensor
    rows: Sequence[Sequence[RowParams]]
    audited: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Chains:
    """tokens int64 (B, K), ids of the target; confidences float32 (B, K), of each.
    distributions: by audited chain, what each of its K tokens was drawn from."""

    tokens: Tensor
    confidences: Tensor
    distributions: Mapping[int, Sequence[DraftDistribution]]


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """tokens int64 (B,), as the target numbers them. probs (B, Vd): the draft's distribution
    over its own vocabulary; confidences (B,): see `confidences_of`."""

    tokens: Tensor
    confidences: Tensor
    probs: Tensor


@torch.no_grad()
def draw(logits: Tensor, rows: Sequence[RowParams], vocabulary: DraftVocabulary) -> DrawnTokens:
    """The draft's token of each row of logits (B, Vd). Ties go to the lowest id, as with the
    target, since draft ids ascend with the target's."""
    weights = scores = warp(logits, rows)
    if not all(row.is_greedy for row in rows):
        noise = _noise(rows, vocabulary).to(weights.device)
        is_drawn = to_device(torch.tensor([not row.is_greedy for row in rows]), weights.device)
        scores = torch.where(is_drawn[:, None], weights + noise, weights)
    best = lowest_argmax(scores)
    seconds = scores.scatter(-1, best[:, None], float("-inf")).amax(-1)
    leads = scores.gather(-1, best[:, None])[:, 0] - seconds
    tokens = vocabulary.ids.to(best.device)[best]
    return DrawnTokens(tokens, confidences_of(leads), torch.softmax(weights, -1))


def confidences_of(leads: Tensor) -> Tensor:
    """0..1, of tokens whose scores, with the noise, lead those of the second best ones by so much.

    The target has the same noise, so that a token which leads by far is accepted where the
    distributions are only about the same, whatever its probability is: of words that are all
    alike each is unlikely, and the one that is drawn is mostly right.
    """
    return -torch.expm1(-leads)


def lead_of(confidence: float) -> float:
    """The lead that has it."""
    return -math.log1p(-min(confidence, 1.0 - 1e-9))


def _noise(rows: Sequence[RowParams], vocabulary: DraftVocabulary) -> Tensor:
    """The target's noise of the tokens of the vocabulary, float32 (B, Vd), made where that lies."""
    ids = vocabulary.ids
    if ids.device.type == "cpu":
        return gumbel_noise_at(rows, ids)
    params = to_device(torch.from_numpy(device_scan.packed(rows)), ids.device)
    return device_scan.noise_at(params, ids, len(vocabulary.index))


@torch.no_grad()
def draft_chains(head: Head, params: Params, cache: HeadCache, start: ChainStart) -> Chains:
    """K = len(start.rows) tokens for each sequence. The cache's lengths stay as they were: after
    verification the rows come again, with the target's features in place of the head's outputs."""
    lengths = [cache.lengths[slot] for slot in start.slots]
    chains = drawn_chains(_CacheSteps(head, params, cache, start.slots), start)
    for slot, length in zip(start.slots, lengths, strict=True):
        cache.rewind(slot, length)
    return chains


@torch.no_grad()
def drawn_chains(steps: ChainSteps, start: ChainStart) -> Chains:
    """`draft_chains`, whatever computes the head; of `start` the slots are the caller's."""
    output, tokens, confidences = start.output, [], []
    distributions: dict[int, list[DraftDistribution]] = {b: [] for b in start.audited}
    for step, rows in enumerate(start.rows):
        drawn = draw(steps.logits(output), rows, steps.vocabulary)
        tokens.append(drawn.tokens)
        confidences.append(drawn.confidences)
        for b, chain in distributions.items():
            chain.append(DraftDistribution.of(drawn.probs[b], steps.vocabulary.ids))
        if step + 1 < len(start.rows):
            output = steps.extended(output, drawn.tokens)
    return Chains(torch.stack(tokens, -1), torch.stack(confidences, -1), distributions)


@dataclass(frozen=True, slots=True)
class _CacheSteps:
    head: Head
    params: Params
    cache: HeadCache
    slots: Sequence[int]

    @property
    def vocabulary(self) -> DraftVocabulary:
        return self.head.vocabulary

    def logits(self, output: Tensor) -> Tensor:
        return self.head.logits(self.params, output)

    def extended(self, output: Tensor, tokens: Tensor) -> Tensor:
        new = NewRows(self.slots, output[:, None], tokens[:, None], [1] * len(self.slots))
        return extend(self.head, self.params, self.cache, new)[:, 0]
