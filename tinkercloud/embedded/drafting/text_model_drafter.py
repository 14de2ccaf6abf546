"""A smaller model with tokens of its own as drafter, through text.

It reads the sample's text in its own tokens, continues it, and its continuation is encoded in the
target's tokens (Timor et al. 2502.05202, "string-level exact match"). The target's noise is for
other tokens than its own, so it cannot draw with it: it takes the most probable tokens, which of
all fixed drafts are accepted most often where the two models agree.

The encoding may be cut otherwise than the target would cut it; such a draft is rejected, which
costs time only.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tinkercloud.decoding.sampler import lowest_argmax
from tinkercloud.embedded.drafting.network_drafter import Chain, DraftRequest, NetworkDrafter
from tinkercloud.embedded.drafting.retokenizer import IncrementalRetokenizer
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.version import Version
from tinkercloud.speculative.drafters.drafter import NO_DRAFT, Draft, Stream
from tinkercloud.weights.token_bytes import TokenizerPair, whole_characters

LOOK_BACK = 4  # of the target's tokens, encoded with what comes after them
MAX_DRAFT_TOKENS = 64  # of the draft model, for one draft


@dataclass(slots=True, eq=False)
class _Reader:
    """num_read: of the stream's tokens."""

    stream: Stream
    text: IncrementalRetokenizer
    num_read: int = 0

    def num_draft_tokens(self, num_target_tokens: int) -> int:
        """As many as this text takes for so many of the target's, and for the rest of the last
        one; more inside a character, which the draft begins anew."""
        ratio = len(self.text.tokens) / max(1, self.num_read)
        count = math.floor(num_target_tokens * ratio + max(0.0, ratio - 1) + 0.5)
        return min(MAX_DRAFT_TOKENS, max(1, count + len(self.text.partial)))


class TextModelDrafter(NetworkDrafter):
    def __init__(self, version: Version, runner: Runner, pool: BlockPool, pair: TokenizerPair):
        super().__init__(version, runner, pool)
        self._target_tokens, self._draft_tokens = pair.target, pair.draft
        self._readers: dict[int, _Reader] = {}

    def begin(self, stream: Stream) -> None:
        super().begin(stream)
        self._readers[stream.id] = _Reader(stream, IncrementalRetokenizer(self._draft_tokens))

    def end(self, stream: Stream) -> None:
        super().end(stream)
        del self._readers[stream.id]

    @torch.inference_mode()
    def catch_up(self, streams: Sequence[Stream]) -> None:
        self._read_ahead([self._start(self._readers[stream.id], 1) for stream in streams])

    @torch.inference_mode()
    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        starts = [self._start(self._readers[s.id], most) for s, most in requests if most > 0]
        chains = self._chains(starts, self._likeliest)
        return [
            self._draft(self._readers[stream.id], chains[stream.id], most)
            if stream.id in chains
            else NO_DRAFT
            for stream, most in requests
        ]

    def _start(self, reader: _Reader, most: int) -> DraftRequest:
        new = reader.stream.tokens[reader.num_read :]
        reader.num_read += len(new)
        self._changed(reader.stream.id, reader.text.append(self._target_tokens.joined(new)))
        return DraftRequest(reader.stream.id, reader.text.tokens, reader.num_draft_tokens(most))

    def _likeliest(self, chains: Sequence[Chain], logits: Tensor) -> tuple[list[int], list[float]]:
        """Probabilities at the sample's temperature; at 1 for greedy samples."""
        temperatures = [
            self._readers[chain.id].stream.params.temperature or 1.0 for chain in chains
        ]
        weights = logits.float() / torch.tensor(temperatures, device=logits.device)[:, None]
        tokens = lowest_argmax(weights)
        logprobs = weights.gather(1, tokens[:, None])[:, 0] - weights.logsumexp(1)
        return tokens.tolist(), logprobs.exp().tolist()

    def _draft(self, reader: _Reader, chain: Chain, most: int) -> Draft:
        pieces = self._pieces(chain)
        text, partial = b"".join(pieces), reader.text.partial
        text = text[: whole_characters(text)]
        if not text.startswith(partial):
            return NO_DRAFT  # the target is inside a character, and this draft begins another one
        tokens = self._encoded(reader.stream, text[len(partial) :])
        starts = [start - len(partial) for start in accumulate(map(len, pieces), initial=0)]
        confidences = self._confidences(tokens, list(zip(starts, chain.probs, strict=False)))
        return Draft(tuple(tokens[:most]), tuple(confidences[:most]))

    def _pieces(self, chain: Chain) -> list[bytes]:
        """Of its tokens up to one without text, such as the end of a sequence."""
        pieces = [self._draft_tokens.of(token) for token in chain.tokens]
        return pieces[: pieces.index(b"")] if b"" in pieces else pieces

    def _encoded(self, stream: Stream, text: bytes) -> list[int]:
        """In the target's tokens, with some tokens before it, since tokens depend on what they
        follow. Where these would be encoded otherwise than they are, with fewer, at last alone."""
        before = stream.tokens[-LOOK_BACK:]
        for first in (0, len(before) - 1, len(before)):
            context = before[first:]
            tokens = self._target_tokens.encode(self._target_tokens.joined(context) + text)
            if tokens[: len(context)] == context:
                return tokens[len(context) :]
        return []

    def _confidences(
        self, tokens: Sequence[int], probs: Sequence[tuple[int, float]]
    ) -> list[float]:
        """probs: where in the text each of the draft's tokens begins, and its probability. A
        token's confidence is the product of those that begin in it; one that began before the text
        counts for the first."""
        ends = list(accumulate(len(self._target_tokens.of(token)) for token in tokens))
        confidences = [1.0] * len(tokens)
        for start, prob in probs:
            place = bisect_right(ends, max(0, start))
            if place < len(tokens):
                confidences[place] *= prob
        return confidences
