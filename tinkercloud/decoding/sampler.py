"""From logits to tokens: warping, position-keyed noise, log-probabilities.

Sampling is Gumbel-max with counter-based noise: the token at absolute position t of sample s is
argmax_x log p_t(x) + g(seed, s, t, x), a pure function of its arguments (design: "seeded
sample-and-match"). Nothing of the surrounding batch enters, so a verifier can check by equality.

Axes: B rows, V vocabulary, k entries.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.core.types import SamplingParams
from tinkercloud.decoding.adjustment import Adjustment

_UINT32_SCALE = 2.0**-32
_NO_LOGITS = torch.empty(0, 0)


@dataclass(frozen=True, slots=True)
class RowParams:
    """What one row of a batch is sampled with; `position` is the absolute index being drawn."""

    params: SamplingParams
    sample_index: int
    position: int
    adjustment: Adjustment | None = None

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0

    @property
    def is_cut(self) -> bool:
        """Whether top-k, top-p or min-p leave something out."""
        params = self.params
        return not self.is_greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0)

    @property
    def is_whole(self) -> bool:
        """Whether nothing but temperature and noise stands between logits and token."""
        return self.is_plain and not self.is_cut

    @property
    def is_plain(self) -> bool:
        """Whether a `Scan` can find its token: those know temperature, top-k and top-p."""
        return self.adjustment is None and (self.is_greedy or self.params.min_p == 0)


def gumbel_noise(seed: int, sample_index: int, position: int, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float32 (V,), keyed by (seed, sample_index, position).

    Philox4x64 (Salmon et al. 2011) with key (seed, sample_index), counter (block, position, 0, 0).
    u = (n + 1/2) 2^-32 keeps its relative precision near 0, where -log1p(-u) decides who wins.
    """
    return noise_of(_uniform_words(seed, sample_index, position, vocab_size))


def gumbel_noise_at(rows: Sequence[RowParams], ids: Tensor) -> Tensor:
    """The entries `ids` int64 (k,) of each row's `gumbel_noise`, float32 (B, k)."""
    entries = ids.cpu().numpy()
    size = int(entries.max()) + 1
    words = [_uniform_words(r.params.seed, r.sample_index, r.position, size)[entries] for r in rows]
    return noise_of(np.stack(words))


def _uniform_words(
    seed: int, sample_index: int, position: int, vocab_size: int
) -> NDArray[np.uint32]:
    """The first `vocab_size` random numbers of a position, uniform in [0, 2**32)."""
    bits = np.random.Philox(
        key=np.array([seed, sample_index], dtype=np.uint64),
        counter=np.array([0, position, 0, 0], dtype=np.uint64),
    )
    return bits.random_raw((vocab_size + 1) // 2).view(np.uint32)[:vocab_size]


def noise_of(words: NDArray[np.uint32]) -> Tensor:
    """Standard Gumbel noise, float32, of uniform random numbers."""
    u = torch.from_numpy(words.astype(np.float32))
    u.add_(0.5).mul_(_UINT32_SCALE)
    return u.neg_().log1p_().neg_().log_().neg_()


def lowest_argmax(values: Tensor) -> Tensor:
    """argmax over the last axis, ties to the lowest index (torch leaves ties open)."""
    best = values.amax(-1, keepdim=True)
    ids = torch.arange(values.shape[-1], device=values.device)
    return torch.where(values == best, ids, values.shape[-1]).amin(-1)


def keep_mask(logprobs: Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> Tensor:
    """Tokens that top-k, then top-p, then min-p leave, bool (V,); logprobs (V,) after temperature,
    up to a constant.

    top-p keeps the smallest set whose mass reaches top_p, the token that crosses it included;
    equal probabilities are ordered by id. min-p keeps what has at least that share of the largest
    probability (Nguyen et al. 2024, arXiv:2407.01082).
    """
    order = torch.sort(logprobs, descending=True, stable=True).indices
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1.0:
        probs = torch.softmax(logprobs[order].double(), -1)
        before = probs.cumsum(-1) - probs
        order = order[before < top_p]
    mask = torch.zeros_like(logprobs, dtype=torch.bool)
    mask[order] = True
    if min_p > 0:
        mask &= logprobs >= logprobs.max() + math.log(min_p)
    return mask


def warp(logits: Tensor, rows: Sequence[RowParams]) -> Tensor:
    """Log-weights of each row's distribution, float32 (B, V): its log-probabilities up to
    one constant per row, -inf for what cannot be drawn.

    Temperature, then top-k, top-p and min-p. Temperature 0 leaves the plain logits. Adjustments
    come before all that.
    """
    weights = logits.float()
    adjusted = [i for i, row in enumerate(rows) if row.adjustment is not None]
    if adjusted and weights is logits:
        weights = weights.clone()
    for i in adjusted:
        adjustment = rows[i].adjustment
        assert adjustment is not None
        weights[i] = adjustment.apply(logits[i])
    if any(r.params.temperature not in (0.0, 1.0) for r in rows):
        weights = weights / _temperatures(rows, logits.device)[:, None]
    cut = [i for i, row in enumerate(rows) if row.is_cut]
    if cut and weights is logits:
        weights = weights.clone()
    for i in cut:
        params = rows[i].params
        kept = keep_mask(weights[i], params.top_k, params.top_p, params.min_p)
        weights[i].masked_fill_(~kept, float("-inf"))
    return weights


@dataclass(frozen=True, slots=True)
class Drawn:
    """tokens int64 (B,), their log-probabilities float32 (B,) under the distribution that was
    sampled from: `warp` of the logits (B, V) less `norms` float64 (B,). Of tokens that a pass drew
    there are logits where they were kept: `places` (B,) says in which row of them, -1 in none.
    places None: each row has its own. drafted_chances (B,): what a pass told of drafted tokens."""

    tokens: Tensor
    logprobs: Tensor
    norms: Tensor
    logits: Tensor
    rows: Sequence[RowParams]
    places: Sequence[int] | None = None
    drafted_chances: Sequence[float] | None = None

    def _place_of(self, row: int) -> int:
        """Of its logits."""
        place = row if self.places is None else self.places[row]
        assert place >= 0, "whose logits were not kept"
        return place

    def distribution(self, row: int) -> Tensor:
        """Log-probabilities of one row, (1, V)."""
        weights = warp(self.logits[self._place_of(row)][None], self.rows[row : row + 1])
        return logprobs_of(weights, self.norms[row : row + 1, None])

    def chances(self, rows: Sequence[int], tokens: Sequence[int]) -> tuple[float, ...]:
        """The probability of that token in each row's distribution; NaN where top-k, top-p or min-p
        leave something out, where logits are adjusted, and at temperature 0. Where a pass has
        drawn, `tokens` are those that it was told to be drafted."""
        if self.drafted_chances is not None:
            return tuple(self.drafted_chances[row] for row, _ in zip(rows, tokens, strict=False))
        chances: list[float] = []
        # A number of a tensor takes several microseconds, one of an array a tenth of that.
        is_here = self.logits.device.type == "cpu" and self.logits.dtype == torch.float32
        logits = self.logits.numpy() if is_here else self.logits
        norms = self.norms.numpy() if is_here else self.norms
        for row, token in zip(rows, tokens, strict=False):
            drawn_with = self.rows[row]
            if drawn_with.is_greedy or drawn_with.is_cut or drawn_with.adjustment is not None:
                chances.append(math.nan)
                continue
            weight = float(logits[self._place_of(row), token]) / drawn_with.params.temperature
            chances.append(math.exp(min(0.0, weight - float(norms[row]))))
        return tuple(chances)

    def distributions(self) -> Tensor:
        """Log-probabilities of all rows, (B, V)."""
        assert self.places is None
        return logprobs_of(warp(self.logits, self.rows), self.norms[:, None])


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a faster look at logits (B, V) says of them.

    best (B,): lowest id of the largest logit. norm float64 (B,): log of the sum of exp(weight) of
    what top-k and top-p leave. count (B,): how many tokens may have the largest score, or -1: more
    than fit. ids and words (B, limit): those, and the random numbers that their noise is made of.
    """

    best: NDArray[np.int64]
    norm: NDArray[np.float64]
    count: NDArray[np.int64]
    ids: NDArray[np.int64]
    words: NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The same of rows that a pass draws from while it makes logits, with the weights float32
    (B, limit) of the tokens that may have the largest score. count: 0, none is a number, or -1,
    more than fit: then logits have to tell. drafted_logits float32 (B,): of the token that each row
    has a draft of, NaN without one. logits (K, V): of the rows whose logits are kept, in their
    order."""

    norm: NDArray[np.float64]
    count: NDArray[np.int64]
    ids: NDArray[np.int64]
    words: NDArray[np.uint32]
    weights: NDArray[np.float32]
    drafted_logits: NDArray[np.float32]
    logits: Tensor = _NO_LOGITS

    def of(self, rows: Sequence[int]) -> "Candidates":
        """Those of some rows; the logits are those of all."""
        each = list(rows)
        return Candidates(
            *(self.norm[each], self.count[each]),
            *(self.ids[each], self.words[each], self.weights[each], self.drafted_logits[each]),
            self.logits,
        )


Scan = Callable[[Tensor, Sequence[RowParams]], Scanned]

Norms = Callable[[Tensor], Tensor]
"""log of the sum of exp of each row of float32 logits (B, V): float64 (B,)."""


def row_norms(logits: Tensor) -> Tensor:
    """`Norms` through torch, on any device."""
    # Not torch.log_softmax: its float32 sum of V terms is biased by about 1e-5 at V = 49152 on a
    # CPU; logsumexp agrees with float64 to 3e-6. Row by row: for a single row torch splits the sum
    # among its threads, for several it does not.
    return torch.stack([torch.logsumexp(row, -1) for row in logits]).double()


def logprobs_of(weights: Tensor, norms: Tensor) -> Tensor:
    """float32, of float32 weights and float64 norms that broadcast with them. The difference is
    rounded once: sampler, scorer and trainer come to the same bits."""
    return (weights.double() - norms.to(weights.device)).float()


def sample(logits: Tensor, rows: Sequence[RowParams], scan: Scan | None = None) -> Drawn:
    """One token per row of logits (B, V); scan: a faster way to find who may be drawn, for the rows
    that it can do. Of these the norms are its own, also where it names no token."""
    if scan is None:
        return _sample(logits, rows)
    is_plain = np.array([row.is_plain for row in rows])
    temperatures = np.array([row.params.temperature or 1.0 for row in rows], np.float32)
    scanned = scan(logits, rows)
    row_ids = np.arange(len(rows))
    places = _best_places(
        scanned,
        lambda row_of, place: (
            _entries(logits, row_of, scanned.ids[row_of, place]) / temperatures[row_of]
        ),
    )
    tokens = torch.from_numpy(
        np.where(scanned.count > 0, scanned.ids[row_ids, places], scanned.best)
    )
    norms = torch.from_numpy(scanned.norm)
    unscanned: dict[int, Drawn] = {}
    for i in np.flatnonzero((scanned.count < 0) | ~is_plain).tolist():
        unscanned[i] = _sample(logits[i : i + 1], rows[i : i + 1])
        tokens[i] = unscanned[i].tokens[0]
    weights = _entries(logits, row_ids, tokens.numpy()) / temperatures
    logprobs = logprobs_of(torch.from_numpy(weights), norms)
    for i, plain in unscanned.items():
        if not is_plain[i]:
            logprobs[i], norms[i] = plain.logprobs[0], plain.norms[0]
    return Drawn(tokens, logprobs, norms, logits, rows)


def sample_candidates(
    candidates: Candidates, rows: Sequence[RowParams], places: Sequence[int] | None = None
) -> Drawn:
    """The token of each row that has candidates; those of the others mean nothing. places: of
    `Drawn`."""
    best = _best_places(candidates, lambda row_of, place: candidates.weights[row_of, place])
    entries = np.arange(len(rows)), best
    tokens = torch.from_numpy(candidates.ids[entries])
    weights = torch.from_numpy(candidates.weights[entries])
    norms = torch.from_numpy(candidates.norm)
    logprobs, chances = logprobs_of(weights, norms), _drafted_chances(candidates, rows)
    return Drawn(tokens, logprobs, norms, candidates.logits, rows, places, chances)


def _drafted_chances(candidates: Candidates, rows: Sequence[RowParams]) -> list[float]:
    """`Drawn.chances` of the drafted tokens; NaN where there is none."""
    temperatures = np.array([row.params.temperature or math.nan for row in rows])
    weights = candidates.drafted_logits / temperatures
    return np.exp(np.minimum(0.0, weights - candidates.norm)).tolist()


def _best_places(
    candidates: Scanned | Candidates,
    weights_of: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]],
) -> NDArray[np.int64]:
    """Among each row's candidates the place of the one with the largest score, the lowest id among
    equals; 0 where there are not several. weights_of: rows and places (n,) -> weights (n,)."""
    best = np.zeros(len(candidates.count), np.int64)
    several = np.flatnonzero(candidates.count > 1)
    if not len(several):
        return best
    row_of, place = np.nonzero(np.arange(candidates.ids.shape[1]) < candidates.count[several, None])
    row_of = several[row_of]
    scores = weights_of(row_of, place) + noise_of(candidates.words[row_of, place]).numpy()
    order = np.lexsort((candidates.ids[row_of, place], -scores, row_of))
    best[several] = place[order[np.unique(row_of[order], return_index=True)[1]]]
    return best


def _temperatures(rows: Sequence[RowParams], device: torch.device) -> Tensor:
    """What logits are divided by: 1 instead of 0."""
    temperatures = [r.params.temperature or 1.0 for r in rows]
    return torch.tensor(temperatures, dtype=torch.float32, device=device)


def _entries(
    logits: Tensor, rows: NDArray[np.int64], ids: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Only these leave the device that the logits are on."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        return logits.numpy()[rows, ids]
    return logits[torch.from_numpy(rows), torch.from_numpy(ids)].float().cpu().numpy()


def _sample(logits: Tensor, rows: Sequence[RowParams]) -> Drawn:
    weights = warp(logits, rows)
    scores = weights
    if not all(r.is_greedy for r in rows):
        scores = weights.clone()
        vocab_size = logits.shape[-1]
        for i, row in enumerate(rows):
            if not row.is_greedy:
                noise = gumbel_noise(row.params.seed, row.sample_index, row.position, vocab_size)
                scores[i] += noise.to(scores.device, non_blocking=True)
    tokens = lowest_argmax(scores)
    norms = row_norms(weights)
    logprobs = logprobs_of(weights.gather(-1, tokens[:, None])[:, 0], norms)
    return Drawn(tokens, logprobs, norms, logits, rows)


def topk_rows(logprobs: Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k best of every row (B, V), ties to the lower id: ids int32 (B, k), logprobs float32
    (B, k).

    Rows with fewer than k tokens of non-zero probability are filled with token 0 / -99999.0.
    """
    k_there = min(k, logprobs.shape[-1])
    values, ids = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    values, ids = values[:, :k_there].cpu().numpy(), ids[:, :k_there].cpu().numpy()
    out_ids = np.zeros((len(ids), k), np.int32)
    out_values = np.full((len(ids), k), -99999.0, np.float32)
    there = np.isfinite(values)
    out_ids[:, :k_there][there] = ids[there]
    out_values[:, :k_there][there] = values[there]
    return out_ids, out_values
