"""Blocks for sequences: reserved within the pool, and taken from others where need be.

Whose blocks are taken is decided by users first: others' prompts give way to the user who was given
the fewest tokens, then samples, the youngest first (`victims.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from tinkercloud.embedded.forward.kv_blocks import BlockPool, blocks_for
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.sampling.queues import Queues
from tinkercloud.embedded.sampling.sequences import Job, Sequence
from tinkercloud.embedded.sampling.victims import prompt_to_free, sample_to_preempt


@dataclass(frozen=True, slots=True)
class KVCache:
    """The blocks of one base's sequences. is_reproducible: keys and values that are computed again
    have the same bits. Only then sequences share blocks, and a pre-empted sample keeps its tokens:
    else the tokens behind it would not follow from the keys and values before them."""

    pool: BlockPool
    is_reproducible: bool


class BlockReservation:
    """cache_of: the blocks of a base. on_discard: is called with a sample whose tokens are dropped,
    because it starts over. fail: is called with a job that can never have so many blocks."""

    def __init__(
        self,
        queues: Queues,
        cache_of: Callable[[BaseModel], KVCache],
        on_discard: Callable[[Sequence], None],
        fail: Callable[[Job, int], None],
    ):
        self._queues, self._cache_of = queues, cache_of
        self._on_discard, self._fail = on_discard, fail
        self.num_preempted = 0
        self.num_discarded = 0  # tokens of samples that started over

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for that many tokens, taken from others if need be. False: not in this step; or
        never, and the job has failed."""
        base = sequence.job.version.base
        pool = self._cache_of(base).pool
        while not sequence.reserve(pool, num_tokens):
            if self.take_blocks(base, sequence):
                continue
            if any(s.blocks for s in self._queues.of_base(base) if s is not sequence):
                if sequence.blocks:
                    self.preempt(sequence)
            else:
                self._fail(sequence.job, blocks_for(num_tokens))
            return False
        return True

    def reserve_prompt(self, prompt: Sequence, num_tokens: int) -> bool:
        """Blocks for that many tokens. Only where no sequence would go on without it a prompt
        takes blocks from samples: else these become free without that. The user who is next takes
        them from others' prompts."""
        base = prompt.job.version.base
        while not prompt.reserve(self._cache_of(base).pool, num_tokens):
            if not self._take_prompt_of_others(base, prompt.job.user):
                alone = not (self._queues.planned or self._queues.running or self._queues.ready)
                return alone and self.reserve(prompt, num_tokens)
        return True

    def make_room(self, job: Job, num_tokens: int, num_ahead: int) -> bool:
        """`_has_room`, after others' prompts gave way."""
        while not self._has_room(job, num_tokens, num_ahead):
            if not self._take_prompt_of_others(job.version.base, job.user):
                return False
        return True

    def take_blocks(self, base: BaseModel, needed_by: Sequence) -> bool:
        """Free the blocks of one that has any: a prompt, of the users first who were given most;
        else a sample."""
        users = self._queues.counters.most_served_first(self._queues.users_of_prompts)
        if self._take_prompt(base, users, needed_by):
            return True
        sample = sample_to_preempt(self._queues.running, needed_by, self._has_blocks(base))
        if sample is not None:
            self.preempt(sample)
        return sample is not None

    def preempt(self, sequence: Sequence) -> None:
        """Free its blocks: it keeps its place in the queue, and computes keys and values again."""
        cache = self._cache_of(sequence.job.version.base)
        self.num_preempted += 1
        sequence.free_blocks(cache.pool, register=cache.is_reproducible)
        if not cache.is_reproducible:
            self.num_discarded += len(sequence.logprobs)
            self._on_discard(sequence)
            sequence.restart()

    def _has_room(self, job: Job, num_tokens: int, num_ahead: int) -> bool:
        """Whether a sample of so many tokens can hope to reach its end, or that many more. To begin
        one that cannot would take blocks from others, who would then take them back."""
        base = job.version.base
        pool = self._cache_of(base).pool
        num_others = sum(bool(s.blocks) for s in self._queues.running if s.job.version.base is base)
        num_new = min(job.num_prompt + job.max_tokens - num_tokens, num_ahead)
        num_held = 0 if job.prompt.blocks else num_tokens
        return not num_others or pool.num_available >= num_others + blocks_for(num_held + num_new)

    def _take_prompt_of_others(self, base: BaseModel, user: str) -> bool:
        """Only for the user who is next."""
        if not self._queues.counters.is_least_served(user):
            return False
        users = self._queues.counters.most_served_first(self._queues.users_of_prompts - {user})
        return self._take_prompt(base, users, None)

    def _take_prompt(self, base: BaseModel, users: list[str], needed_by: Sequence | None) -> bool:
        for queue in (self._queues.waiting, self._queues.ready):
            youngest_first = (job for user in users for job in queue.youngest_first(user))
            job = prompt_to_free(youngest_first, needed_by, self._has_blocks(base))
            if job is None:
                continue
            cache = self._cache_of(base)
            job.prompt.free_blocks(cache.pool, register=cache.is_reproducible)
            if queue is self._queues.ready:
                self._queues.ready.remove(job)
                self._queues.waiting.append_first(job)
            return True
        return False

    def _has_blocks(self, base: BaseModel) -> Callable[[Sequence], bool]:
        """Whether a sequence has blocks that can be taken: none of what the next pass computes."""

        def has_blocks(sequence: Sequence) -> bool:
            is_here = sequence.job.version.base is base and sequence not in self._queues.planned
            return is_here and bool(sequence.blocks)

        return has_blocks
