"""Unembedding and log-probabilities in chunks of rows, forward and backward.

No more than LOGIT_ROWS rows of logits are in memory at a time, and with the compiled pass none but
of rows that train: one buffer holds a chunk's logits, then, where these are wanted, its
probabilities or the gradient of its logits. Where a loss is a sum over tokens, the gradient of a
log-probability follows from that alone, and a chunk's logits are computed once.

Axes: n rows of a chunk, D hidden, V vocabulary, P pairs (row, target).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.decoding.sampler import logprobs_of
from tinkercloud.embedded.native.linear_gradient import Outputs, TargetGradients
from tinkercloud.embedded.training.linear import Group, Linears, ModelWeights, Segment
from tinkercloud.embedded.training.targets import Order, Targets

LOGIT_ROWS = 256


@dataclass(frozen=True, slots=True)
class Pairs:
    """rows int64 (P,), ascending: of some rows, those that have the targets ids int64 (P,)."""

    rows: Tensor
    ids: Tensor


class Unembedding(Protocol):
    """From final hidden rows (T, D) to probabilities; rows (n,) are some of them, ascending. cap:
    of logits, cap * tanh(x / cap) of what the product gave, or 0."""

    cap: float

    @property
    def wide(self) -> Tensor:
        """A buffer, float32 (LOGIT_ROWS or more, V)."""
        ...

    def inputs(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """What the product reads, (n or some more, D), in the type of gradients."""
        ...

    def logits(
        self, hidden: Tensor, rows: NDArray[np.int64], inputs: Tensor, segments: Sequence[Segment]
    ) -> Tensor:
        """(as many as inputs, V), good until the next call."""
        ...

    def score(
        self, hidden: Tensor, rows: NDArray[np.int64], pairs: Pairs, segments: Sequence[Segment]
    ) -> tuple[Tensor, Tensor]:
        """The logits (P,) of targets of these rows, and the rows' normalizers, float64 (n,)."""
        ...

    def normalize(self, logits: Tensor, *, probabilities: bool) -> Tensor:
        """The log of the sum of exp of each row, float64; where it is asked for, `wide` then has
        the probabilities."""
        ...


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of one share, all active or all idle. rows: in the pass's order. pairs: in the
    share's."""

    share: int
    active: bool
    rows: slice
    pairs: slice


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Neighbouring pieces, all active or all idle."""

    pieces: tuple[_Piece, ...]

    @property
    def active(self) -> bool:
        return self.pieces[0].active

    @property
    def rows(self) -> slice:
        return slice(self.pieces[0].rows.start, self.pieces[-1].rows.stop)

    @property
    def num_rows(self) -> int:
        return self.rows.stop - self.rows.start


class Head:
    """The end of one pass: from final hidden rows to losses and the gradient of these rows."""

    def __init__(
        self,
        linears: Linears,
        models: Sequence[ModelWeights],
        unembedding: Unembedding,
        targets: Sequence[Targets],
        order: Order,
    ):
        self._linears, self._models, self._unembedding = linears, models, unembedding
        # With a cap what the product gave has another gradient than the logits.
        self._fuses = linears.fuses and not unembedding.cap
        self._slopes: Tensor | None = None  # of the cap, for the chunk underway
        self._targets, self._order = targets, order
        device = targets[0].ids.device
        self._rows = torch.from_numpy(order.rows).to(device)
        self._pair_rows = [torch.from_numpy(rows).to(device) for rows in order.pair_rows]

    def forward(self, hidden: Tensor) -> Iterator[None]:
        """Scores all pairs, without any gradient; yields after each chunk."""
        for chunk in self._chunks():
            self._score(chunk, hidden)
            yield
        for targets in self._targets:
            if targets.per_sequence:
                targets.score_sequences(with_gradient=False)

    def forward_backward(
        self, hidden: Tensor, dhidden: Tensor, show: Callable[[Tensor, Tensor], None] | None
    ) -> Iterator[None]:
        """hidden (T, D). Scores all pairs, adds the head's gradients to the models and writes those
        of the rows to dhidden (T, D), which the caller zeroed; yields after each chunk. show:
        receives each chunk's packed rows (n,) and their probabilities (n, V)."""
        late = any(targets.per_sequence for targets in self._targets)
        for chunk in self._chunks():
            trains = chunk.active and not late
            if not trains and show is None:
                self._score(chunk, hidden)
                yield
                continue
            probabilities = show is not None or (trains and not self._fuses)
            inputs, norms, gradients = self._logprobs(
                chunk, hidden, with_gradient=trains, probabilities=probabilities
            )
            if show is not None:
                show(self._rows[chunk.rows], self._unembedding.wide[: chunk.num_rows])
            if trains:
                pair_gradients = self._target_gradients(
                    chunk, gradients, None if probabilities else norms
                )
                dhidden[self._rows[chunk.rows]] = self._backward(chunk, inputs, pair_gradients)
            yield
        if late:
            yield from self._backward_of_sequences(hidden, dhidden)

    def _backward_of_sequences(self, hidden: Tensor, dhidden: Tensor) -> Iterator[None]:
        """Where a token's gradient depends on its whole sequence, which is scored by now: logits
        are computed again."""
        for targets in self._targets:
            targets.score_sequences(with_gradient=True)
        for chunk in self._chunks():
            if chunk.active:
                inputs, logits = self._logits(chunk, hidden)
                self._slopes = self._slopes_of(logits)
                norms = self._unembedding.normalize(logits, probabilities=not self._fuses)
                gradients = [self._targets[p.share].gradient[p.pairs] for p in chunk.pieces]
                pair_gradients = self._target_gradients(
                    chunk, gradients, norms if self._fuses else None
                )
                dhidden[self._rows[chunk.rows]] = self._backward(chunk, inputs, pair_gradients)
                yield

    def _score(self, chunk: _Chunk, hidden: Tensor) -> None:
        """Scores the pairs of rows whose logits nobody needs."""
        pairs, rows = self._pairs(chunk), self._order.rows[chunk.rows]
        logits, norms = self._unembedding.score(hidden, rows, pairs, self._segments(chunk))
        logprobs = logprobs_of(logits, norms[pairs.rows])
        counts = [piece.pairs.stop - piece.pairs.start for piece in chunk.pieces]
        for piece, scores in zip(chunk.pieces, logprobs.split(counts), strict=True):
            self._targets[piece.share].score(piece.pairs, scores, with_gradient=False)

    def _logprobs(
        self, chunk: _Chunk, hidden: Tensor, *, with_gradient: bool, probabilities: bool
    ) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """What the logits were computed of, their normalizers, and the gradients of each piece's
        log-probabilities."""
        inputs, logits = self._logits(chunk, hidden)
        picked = [
            logits[self._in_chunk(chunk, p), self._targets[p.share].ids[p.pairs]]
            for p in chunk.pieces
        ]
        self._slopes = self._slopes_of(logits) if with_gradient else None
        norms = self._unembedding.normalize(logits, probabilities=probabilities)
        gradients = []
        for piece, scores in zip(chunk.pieces, picked, strict=True):
            logprobs = logprobs_of(scores, norms[self._in_chunk(chunk, piece)])
            targets = self._targets[piece.share]
            gradients.append(targets.score(piece.pairs, logprobs, with_gradient=with_gradient))
        return inputs, norms, gradients

    def _logits(self, chunk: _Chunk, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """And what they were computed of."""
        inputs = self._unembedding.inputs(hidden, self._rows[chunk.rows])
        rows = self._order.rows[chunk.rows]
        return inputs, self._unembedding.logits(hidden, rows, inputs, self._segments(chunk))

    def _target_gradients(
        self, chunk: _Chunk, gradients: Sequence[Tensor | None], norms: Tensor | None
    ) -> TargetGradients:
        """norms: None where the buffer holds probabilities."""
        pairs = self._pairs(chunk)
        present = [gradient for gradient in gradients if gradient is not None]
        assert len(present) == len(chunk.pieces), "a chunk that trains has all gradients"
        return TargetGradients(norms, pairs.rows, pairs.ids, torch.cat(present))

    def _pairs(self, chunk: _Chunk) -> Pairs:
        rows = [self._in_chunk(chunk, piece) for piece in chunk.pieces]
        ids = [self._targets[piece.share].ids[piece.pairs] for piece in chunk.pieces]
        return Pairs(torch.cat(rows), torch.cat(ids))

    def _backward(self, chunk: _Chunk, inputs: Tensor, targets: TargetGradients) -> Tensor:
        """The gradient of the chunk's rows. The buffer holds their logits or probabilities."""
        rows = self._unembedding.wide[: len(inputs)]
        group = Group(self._linears, ("lm_head",), self._segments(chunk))
        if self._fuses:
            return group.backward_from(inputs, Outputs(group.matrices(), rows, [0], targets))
        dlogits = targets.to_gradient_(rows)
        if self._slopes is not None:
            dlogits *= self._slopes
        dx = group.backward(inputs, dlogits.to(inputs.dtype))
        assert dx is not None
        return dx[: chunk.num_rows]

    def _slopes_of(self, logits: Tensor) -> Tensor | None:
        """Of capped logits (n, V)."""
        cap = self._unembedding.cap
        return 1 - (logits.float() / cap).square_() if cap else None

    def _in_chunk(self, chunk: _Chunk, piece: _Piece) -> Tensor:
        """The chunk's row of each of the piece's pairs."""
        return self._pair_rows[piece.share][piece.pairs] - chunk.rows.start

    def _segments(self, chunk: _Chunk) -> list[Segment]:
        """Of the chunk's rows."""
        first = chunk.rows.start
        return [
            Segment(self._models[p.share], p.rows.start - first, p.rows.stop - first)
            for p in chunk.pieces
        ]

    def _chunks(self) -> list[_Chunk]:
        """Active rows first; no chunk holds both kinds. A share's rows are cut as they would be
        without other shares, and a piece is never cut again: sums over a piece keep their bits."""
        chunks: list[list[_Piece]] = []
        for piece in self._pieces():
            last = chunks[-1] if chunks else []
            fits = last and piece.rows.stop - last[0].rows.start <= LOGIT_ROWS
            if fits and last[0].active == piece.active:
                last.append(piece)
            else:
                chunks.append([piece])
        return [_Chunk(tuple(pieces)) for pieces in chunks]

    def _pieces(self) -> Iterator[_Piece]:
        for span in self._order.spans:
            of_share = self._order.pair_rows[span.share]
            for start in range(span.rows.start, span.rows.stop, LOGIT_ROWS):
                stop = min(start + LOGIT_ROWS, span.rows.stop)
                first, last = map(int, np.searchsorted(of_share, (start, stop)))
                active = stop <= self._order.num_active
                yield _Piece(span.share, active, slice(start, stop), slice(first, last))
