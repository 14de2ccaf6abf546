"""Unembedding and log-probabilities in chunks of rows, forward and backward.

No more than LOGIT_ROWS rows of logits are in memory at a time: one buffer holds a chunk's logits,
then its probabilities, then the gradient of its logits. Where a loss is a sum over tokens, the
gradient of a log-probability follows from that alone, and a chunk's logits are computed once.

Axes: n rows of a chunk, D hidden, V vocabulary, P pairs (row, target).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinkercloud.embedded.forward.row_invariance import pad_rows
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.training.linear import Group, Linears, ModelWeights, Segment
from tinkercloud.embedded.training.rowwise import softmax
from tinkercloud.embedded.training.targets import Order, Targets

LOGIT_ROWS = 256


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
        base: BaseModel,
        linears: Linears,
        models: Sequence[ModelWeights],
        targets: Sequence[Targets],
        order: Order,
    ):
        self._base, self._linears, self._models = base, linears, models
        self._targets, self._order = targets, order
        self._rows = base.tensor(order.rows)
        self._pair_rows = [base.tensor(rows) for rows in order.pair_rows]
        vocab = linears.weight("lm_head").shape[0]
        num_rows = pad_rows(min(LOGIT_ROWS, len(order.rows)))
        self._wide = torch.empty(num_rows, vocab, device=base.device)
        narrow = base.dtype != torch.float32
        self._narrow = self._wide.to(base.dtype) if narrow else self._wide

    def forward(self, hidden: Tensor) -> Iterator[None]:
        """Scores all pairs, without any gradient; yields after each chunk."""
        for chunk in self._chunks():
            self._logprobs(chunk, hidden, with_gradient=False)
            yield
        for targets in self._targets:
            if targets.per_sequence:
                targets.score_sequences(with_gradient=False)

    def forward_backward(
        self, hidden: Tensor, dhidden: Tensor, show: Callable[[Tensor, Tensor], None]
    ) -> Iterator[None]:
        """hidden (T, D). Scores all pairs, adds the head's gradients to the models and writes those
        of the rows to dhidden (T, D), which the caller zeroed; yields after each chunk. show:
        receives each chunk's packed rows (n,) and their probabilities (n, V)."""
        late = any(targets.per_sequence for targets in self._targets)
        for chunk in self._chunks():
            rows, down, gradients = self._logprobs(chunk, hidden, with_gradient=not late)
            show(self._rows[chunk.rows], self._wide[: chunk.num_rows])
            if chunk.active and not late:
                dhidden[self._rows[chunk.rows]] = self._backward(chunk, rows, down, gradients)
            yield
        if not late:
            return
        for targets in self._targets:
            targets.score_sequences(with_gradient=True)
        for chunk in self._chunks():
            if chunk.active:
                rows, down = self._probabilities(chunk, hidden)
                gradients = [self._targets[p.share].gradient[p.pairs] for p in chunk.pieces]
                dhidden[self._rows[chunk.rows]] = self._backward(chunk, rows, down, gradients)
                yield

    def _logprobs(
        self, chunk: _Chunk, hidden: Tensor, *, with_gradient: bool
    ) -> tuple[Tensor, list[Tensor | None], list[Tensor | None]]:
        rows, down = self._logits(chunk, hidden)
        logits = self._narrow[: len(rows)]
        picked = [
            logits[self._in_chunk(chunk, p), self._targets[p.share].ids[p.pairs]].float()
            for p in chunk.pieces
        ]
        normalizer = softmax(logits, self._wide[: len(rows)])
        gradients = []
        wants = with_gradient and chunk.active
        for piece, scores in zip(chunk.pieces, picked, strict=True):
            logprobs = scores - normalizer[self._in_chunk(chunk, piece)]
            targets = self._targets[piece.share]
            gradients.append(targets.score(piece.pairs, logprobs, with_gradient=wants))
        return rows, down, gradients

    def _probabilities(self, chunk: _Chunk, hidden: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        rows, down = self._logits(chunk, hidden)
        softmax(self._narrow[: len(rows)], self._wide[: len(rows)])
        return rows, down

    def _logits(self, chunk: _Chunk, hidden: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        rows = hidden.new_zeros(pad_rows(chunk.num_rows), hidden.shape[1])
        rows[: chunk.num_rows] = hidden[self._rows[chunk.rows]]
        _, down = self._group(chunk).forward(rows, out=self._narrow[: len(rows)])
        return rows, down

    def _backward(
        self,
        chunk: _Chunk,
        rows: Tensor,
        down: list[Tensor | None],
        gradients: Sequence[Tensor | None],
    ) -> Tensor:
        """The gradient of the chunk's rows. The buffer holds their probabilities p; in place it
        becomes d loss / d logits = g (onehot - p), g being d loss / d logprob."""
        dlogits = self._wide[: len(rows)]
        total = torch.zeros(len(rows), device=rows.device)
        places = []
        for piece, gradient in zip(chunk.pieces, gradients, strict=True):
            assert gradient is not None
            at = self._in_chunk(chunk, piece)
            total.index_add_(0, at, gradient)
            ids = self._targets[piece.share].ids[piece.pairs]
            places.append((at * dlogits.shape[1] + ids, gradient))
        dlogits.mul_(-total[:, None])
        for place, gradient in places:
            dlogits.view(-1).index_add_(0, place, gradient)
        if self._narrow is not self._wide:
            self._narrow[: len(rows)] = dlogits
        dy = self._narrow[: len(rows)]
        dx = self._group(chunk).backward(rows, down, dy)
        assert dx is not None
        return dx[: chunk.num_rows]

    def _in_chunk(self, chunk: _Chunk, piece: _Piece) -> Tensor:
        """The chunk's row of each of the piece's pairs."""
        return self._pair_rows[piece.share][piece.pairs] - chunk.rows.start

    def _group(self, chunk: _Chunk) -> Group:
        first = chunk.rows.start
        segments = [
            Segment(self._models[p.share], p.rows.start - first, p.rows.stop - first)
            for p in chunk.pieces
        ]
        return Group(self._linears, ("lm_head",), segments)

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
