"""Log-probabilities of prompts: of each token, of the k best, of given targets.

Axes: P prompt tokens, n rows of one prefill chunk, V vocabulary, K targets per position.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.core.types import PromptAltTokens, SampleRequest, Topk
from tinkercloud.decoding.alt_tokens import alt_tokens
from tinkercloud.decoding.sampler import Norms, logprobs_of, topk_rows

UNSCORED_LOGPROB = -99999.0


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Tokens int64 (n, K) that are scored in the n rows from position `first` on."""

    first: int
    ids: NDArray[np.int64]


class PromptScores:
    """Collects the log-probabilities that a request selects, chunk by chunk of its prompt."""

    def __init__(self, request: SampleRequest, norms: Norms, *, fuses: bool = False):
        """norms: the sampler's own, so that a token's score is the log-probability that it would be
        sampled with. fuses: passes score targets without logits where nothing else is wanted."""
        self._prompt, self._norms, self._fuses = request.prompt, norms, fuses
        length = len(request.prompt)
        last_n = request.prompt_logprobs_last_n
        self._first = length  # scored position, but for targets
        if request.prompt_logprobs or request.topk_prompt_logprobs > 0:
            self._first = 1 if last_n is None else max(1, length - last_n)
        self.logprobs = np.full(length, np.nan, np.float32) if request.prompt_logprobs else None
        self.topk: Topk | None = None
        if request.topk_prompt_logprobs > 0:
            shape = (length, request.topk_prompt_logprobs)
            unscored = np.full(shape, UNSCORED_LOGPROB, np.float32)
            self.topk = Topk(np.zeros(shape, np.int32), unscored)
        self._targets = request.target_prompt_logprobs
        self.target_logprobs = (
            np.zeros(self._targets.shape, np.float32) if self._targets is not None else None
        )
        self._params = request.params
        self.alt_tokens: PromptAltTokens | None = None
        if request.prompt_alt_tokens:
            shape = (length - 1, request.prompt_alt_tokens)
            self.alt_tokens = PromptAltTokens(
                np.zeros(shape, np.int64), np.zeros(shape, np.float32)
            )

    @property
    def needs_logits(self) -> bool:
        """Else `rows` and `record` do."""
        return not self._fuses or self.topk is not None or self.alt_tokens is not None

    def rows(self, start: int, count: int) -> ScoredRows:
        """What is scored of positions start..start+count-1; row i predicts position i + 1."""
        stop = min(start + count, len(self._prompt) - 1)
        first = start
        if self._targets is None and self.alt_tokens is None:
            first = max(start, self._first - 1)
        span = slice(first, max(first, stop))
        columns: list[NDArray[np.int64]] = [np.zeros((span.stop - span.start, 0), np.int64)]
        if self.logprobs is not None:
            columns.append(self._prompt[span.start + 1 : span.stop + 1, None].astype(np.int64))
        if self._targets is not None:
            columns.append(self._targets[span].astype(np.int64).clip(min=0))
        return ScoredRows(first, np.concatenate(columns, axis=1))

    def record(self, rows: ScoredRows, logits: Tensor, norms: Tensor) -> None:
        """logits (n, K) of the tokens, norms float64 (n,): softmax at temperature 1, whatever the
        sampling temperature."""
        values = logprobs_of(logits, norms[:, None]).cpu().numpy()
        end = rows.first + len(values)
        if self.logprobs is not None:
            scored = slice(min(max(rows.first + 1, self._first), end + 1), end + 1)
            self.logprobs[scored] = values[scored.start - rows.first - 1 :, 0]
            values = values[:, 1:]
        if self.target_logprobs is not None and self._targets is not None:
            unknown = self._targets[rows.first : end] < 0
            self.target_logprobs[rows.first : end] = np.where(unknown, 0.0, values)

    def add(self, start: int, logits: Tensor) -> None:
        """logits (n, V) of positions start..start+n-1."""
        rows = self.rows(start, len(logits))
        num_rows, skipped = len(rows.ids), rows.first - start
        if not num_rows:
            return
        wide = logits[skipped : skipped + num_rows].float()
        norms = self._norms(wide).to(wide.device)
        ids = torch.from_numpy(rows.ids).to(wide.device)
        self.record(rows, wide.gather(-1, ids), norms)
        self._record_distributions(rows.first + 1, wide, norms[:, None])

    def _record_distributions(self, position: int, logits: Tensor, norms: Tensor) -> None:
        """logits (n, V), norms (n, 1) of positions position..position+n-1."""
        end = position + len(logits)
        scored = slice(max(position, self._first), end)
        first = scored.start - position
        if self.topk is not None and first < len(logits):
            rows = logprobs_of(logits[first:], norms[first:])
            ids, values = topk_rows(rows, self.topk.token_ids.shape[1])
            self.topk.token_ids[scored], self.topk.logprobs[scored] = ids, values
        if self.alt_tokens is not None:
            k = self.alt_tokens.tokens.shape[1]
            tokens = alt_tokens(logits, self._params, position, k).to(logits.device)
            self.alt_tokens.tokens[position - 1 : end - 1] = tokens.cpu().numpy()
            values = logprobs_of(logits.gather(-1, tokens), norms)
            self.alt_tokens.logprobs[position - 1 : end - 1] = values.cpu().numpy()
