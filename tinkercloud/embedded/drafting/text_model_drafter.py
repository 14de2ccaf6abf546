"""A smaller model with tokens of its own as drafter, through text.

It reads the sample's text in its own tokens, writes on, and what it wrote is told in the target's
tokens (Timor et al. 2502.05202, "string-level exact match"). The target's noise is for other tokens
than its own, so it cannot draw with it: it writes what is most probable, which of all fixed drafts
stands most often where the two models agree.

What is told in the target's tokens may be cut otherwise than the target would cut it; such a draft
does not stand, and that is all.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tinkercloud.decoding.sampler import lowest_argmax
from tinkercloud.embedded.drafting.draft_network import Chain, DraftNetwork, Start
from tinkercloud.embedded.drafting.retokenizer import IncrementalRetokenizer
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.version import Version
from tinkercloud.speculative.drafters.drafter import NO_DRAFT, Draft, Drafter, Stream
from tinkercloud.weights.token_bytes import TokenizerPair, whole_characters

LOOK_BACK = 4  # of the target's tokens that are encoded with what comes after them
MOST_OWN = 64  # of its own tokens, in a draft


@dataclass(slots=True, eq=False)
class _Reader:
    """num_read: of the stream's tokens."""

    stream: Stream
    text: IncrementalRetokenizer
    num_read: int = 0

    def num_own(self, most: int) -> int:
        """Of the draft's tokens, for so many of the target's: as many as this text takes, and what
        the last of the target's may lack to its end; more inside a character, which it begins."""
        ratio = len(self.text.tokens) / max(1, self.num_read)
        wanted = math.floor(most * ratio + max(0.0, ratio - 1) + 0.5) + len(self.text.held)
        return min(MOST_OWN, max(1, wanted))


class TextModelDrafter(Drafter):
    """The version's weights may be replaced between rounds (`use`)."""

    name = "model"

    def __init__(self, version: Version, runner: Runner, pool: BlockPool, pair: TokenizerPair):
        self._network = DraftNetwork(version, runner, pool)
        self._target, self._own = pair.target, pair.draft
        self._readers: dict[int, _Reader] = {}

    def use(self, version: Version) -> None:
        """Other weights of the same network."""
        self._network.use(version)

    def begin(self, stream: Stream) -> None:
        self._readers[stream.id] = _Reader(stream, IncrementalRetokenizer(self._own))
        self._network.begin(stream.id)

    def end(self, stream: Stream) -> None:
        del self._readers[stream.id]
        self._network.end(stream.id)

    @torch.inference_mode()
    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        starts = [self._start(self._readers[s.id], most) for s, most in requests if most > 0]
        chains = self._network.go_on(starts, self._likeliest)
        return [
            self._draft(self._readers[stream.id], chains[stream.id], most)
            if stream.id in chains
            else NO_DRAFT
            for stream, most in requests
        ]

    def _start(self, reader: _Reader, most: int) -> Start:
        new = reader.stream.tokens[reader.num_read :]
        reader.num_read += len(new)
        self._network.changed(reader.stream.id, reader.text.append(self._target.joined(new)))
        return Start(reader.stream.id, reader.text.tokens, reader.num_own(most))

    def _likeliest(self, chains: Sequence[Chain], logits: Tensor) -> tuple[list[int], list[float]]:
        """Chances are those at the sample's temperature; at 0, those at 1."""
        drawn_at = [self._readers[chain.id].stream.params.temperature or 1.0 for chain in chains]
        weights = logits.float() / torch.tensor(drawn_at, device=logits.device)[:, None]
        tokens = lowest_argmax(weights)
        logprobs = weights.gather(1, tokens[:, None])[:, 0] - weights.logsumexp(1)
        return tokens.tolist(), logprobs.exp().tolist()

    def _draft(self, reader: _Reader, chain: Chain, most: int) -> Draft:
        pieces = self._pieces(chain)
        text, held = b"".join(pieces), reader.text.held
        text = text[: whole_characters(text)]
        if not text.startswith(held):
            return NO_DRAFT  # it does not go on where the target is inside a character
        tokens = self._in_targets_tokens(reader.stream, text[len(held) :])
        starts = [begin - len(held) for begin in accumulate(map(len, pieces), initial=0)]
        chances = self._chances(tokens, list(zip(starts, chain.chances, strict=False)))
        return Draft(tuple(tokens[:most]), tuple(chances[:most]))

    def _pieces(self, chain: Chain) -> list[bytes]:
        """Of its tokens up to one that is no text, as at the end of what it has to say."""
        pieces = [self._own.of(token) for token in chain.tokens]
        return pieces[: pieces.index(b"")] if b"" in pieces else pieces

    def _in_targets_tokens(self, stream: Stream, text: bytes) -> list[int]:
        """With some tokens before it, as tokens depend on what they follow. Where these would then
        be others than they are, with fewer of them, and at last alone."""
        before = stream.tokens[-LOOK_BACK:]
        for first in (0, len(before) - 1, len(before)):
            known = before[first:]
            tokens = self._target.encode(self._target.joined(known) + text)
            if tokens[: len(known)] == known:
                return tokens[len(known) :]
        return []

    def _chances(self, tokens: Sequence[int], own: Sequence[tuple[int, float]]) -> list[float]:
        """own: where in the text each of the draft's tokens begins, and its chance. A token's is
        the product of those that begin in it; what began before the text counts for the first."""
        ends = list(accumulate(len(self._target.of(token)) for token in tokens))
        chances = [1.0] * len(tokens)
        for begin, chance in own:
            place = bisect_right(ends, max(0, begin))
            if place < len(tokens):
                chances[place] *= chance
        return chances
