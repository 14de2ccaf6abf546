"""Log-probabilities of prompts: of each token, of the k best, of given targets.

Axes: P prompt tokens, n rows of one prefill chunk, V vocabulary, K targets per position.
"""

import numpy as np
import torch
from torch import Tensor

from tinkercloud.core.types import PromptAltTokens, SampleRequest, Topk
from tinkercloud.decoding.alt_tokens import alt_tokens
from tinkercloud.decoding.sampler import Norms, logprobs_of, topk_rows

UNSCORED_LOGPROB = -99999.0


class PromptScores:
    """Collects the log-probabilities that a request selects, chunk by chunk of its prompt."""

    def __init__(self, request: SampleRequest, norms: Norms):
        """norms: the sampler's own, so that a token's score is the log-probability that it would be
        sampled with."""
        self._prompt, self._norms = request.prompt, norms
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

    def add(self, start: int, logits: Tensor) -> None:
        """logits (n, V) of positions start..start+n-1; row i predicts position i + 1.

        Softmax at temperature 1, whatever the sampling temperature.
        """
        stop = min(start + len(logits), len(self._prompt) - 1)
        if self._targets is None and self.alt_tokens is None:
            first = max(start, self._first - 1)
            start, logits = first, logits[first - start :]
        if start < stop:
            rows = logits[: stop - start].float()
            self._record(start + 1, rows, self._norms(rows)[:, None].to(rows.device))

    def _record(self, position: int, logits: Tensor, norms: Tensor) -> None:
        """logits (n, V), norms (n, 1) of positions position..position+n-1."""
        end = position + len(logits)
        scored = slice(max(position, self._first), end)
        first = scored.start - position
        if self.logprobs is not None and first < len(logits):
            tokens = torch.from_numpy(self._prompt[scored].astype(np.int64)).to(logits.device)
            values = _at(tokens[:, None], logits[first:], norms[first:])
            self.logprobs[scored] = values[:, 0].cpu().numpy()
        if self.topk is not None and first < len(logits):
            rows = logprobs_of(logits[first:], norms[first:])
            ids, values = topk_rows(rows, self.topk.token_ids.shape[1])
            self.topk.token_ids[scored], self.topk.logprobs[scored] = ids, values
        if self.target_logprobs is not None and self._targets is not None:
            targets = torch.from_numpy(self._targets[position - 1 : end - 1]).to(logits.device)
            values = _at(targets.clamp(min=0), logits, norms).masked_fill(targets < 0, 0.0)
            self.target_logprobs[position - 1 : end - 1] = values.cpu().numpy()
        if self.alt_tokens is not None:
            k = self.alt_tokens.tokens.shape[1]
            tokens = alt_tokens(logits, self._params, position, k).to(logits.device)
            self.alt_tokens.tokens[position - 1 : end - 1] = tokens.cpu().numpy()
            values = _at(tokens, logits, norms)
            self.alt_tokens.logprobs[position - 1 : end - 1] = values.cpu().numpy()


def _at(tokens: Tensor, logits: Tensor, norms: Tensor) -> Tensor:
    """Log-probabilities float32 (n, K) of tokens (n, K)."""
    return logprobs_of(logits.gather(-1, tokens), norms)
