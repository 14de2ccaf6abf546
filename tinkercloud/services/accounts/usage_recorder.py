"""Counts tokens as they are computed, in memory; the counts are written each second.

A server that is killed loses at most the last second's counts. A request is counted when it has
succeeded, in the hour in which it did.
"""

import asyncio
import logging
import time
from collections import Counter
from typing import NamedTuple

from tinkercloud.core.types import SampleOutput, TrainBatch
from tinkercloud.storage.metadata import Model, Sampler
from tinkercloud.storage.usage_storage import TokenKind, UsageKey, UsageStorage

logger = logging.getLogger(__name__)

HOUR_S = 3600
FLUSH_S = 1.0


class TokenSource(NamedTuple):
    user: str
    base_model: str
    kind: TokenKind


class UsageRecorder:
    def __init__(self, storage: UsageStorage):
        self._storage = storage
        self._counts: Counter[UsageKey] = Counter()
        self._totals: Counter[TokenSource] = Counter()
        self._of_users: Counter[str] = Counter()

    def num_tokens(self, user: str) -> int:
        """Of all kinds, since the start."""
        return self._of_users[user]

    def trained(self, model: Model, batch: TrainBatch) -> None:
        """forward_backward or forward: every token of its sequences, once."""
        self._add(model, "training", batch.num_tokens)

    def sampled(self, sampler: Sampler, num_prompt_tokens: int, output: SampleOutput) -> None:
        """The prompt once, however many samples share it, and every token that was drawn."""
        num_cached = min(output.prompt_cache_hit_tokens, num_prompt_tokens)
        self._add(sampler, "cached_prefill", num_cached)
        self._add(sampler, "prefill", num_prompt_tokens - num_cached)
        self._add(sampler, "sample", sum(len(sequence.tokens) for sequence in output.sequences))

    def abandoned(self, sampler: Sampler, num_prompt_tokens: int, num_sampled: int) -> None:
        """A stream whose reader went away after it had got so many tokens."""
        if num_sampled:
            self._add(sampler, "prefill", num_prompt_tokens)
            self._add(sampler, "sample", num_sampled)

    def _add(self, owner: Model | Sampler, kind: TokenKind, num_tokens: int) -> None:
        if num_tokens:
            hour = int(time.time()) // HOUR_S * HOUR_S
            key = UsageKey(hour, owner.user, owner.session_id, owner.base_model, kind)
            self._counts[key] += num_tokens
            self._totals[TokenSource(owner.user, owner.base_model, kind)] += num_tokens
            self._of_users[owner.user] += num_tokens

    def totals(self) -> list[tuple[TokenSource, int]]:
        """Since the start."""
        return list(self._totals.items())

    async def flush(self) -> None:
        """Write what was counted since the last time."""
        counts, self._counts = self._counts, Counter()
        if not counts:
            return
        try:
            await self._storage.add_tokens(counts)
        except Exception:  # kept for the next time
            # Not where the caller was cancelled: what is queued is written all the same.
            self._counts += counts
            raise

    async def flush_forever(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                await self.flush()
            except Exception:  # a full disk, say: the counts are kept, and tried again
                logger.exception("the usage of the last second was not recorded")
