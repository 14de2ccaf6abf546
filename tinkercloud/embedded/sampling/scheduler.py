"""Admission, reservation of blocks, and pre-emption: which tokens the next step computes.

A job waits until its prompt is computed; then it is ready, and its samples begin as far as the
batch and the blocks allow; running samples get their next token in every step. A sequence is tokens
of which some have their keys and values in blocks; a step brings it as many forward as the budget
allows. So a prompt, a sample that is decoded, and a sample that lost its blocks and computes them
again are scheduled alike.

Needs no model: what it knows of a base is its `KVCache`.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tinkercloud.embedded.forward.kv_blocks import BLOCK_TOKENS, BlockPool, Digest, blocks_for
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.sampling.batch_plan import BatchItem
from tinkercloud.embedded.sampling.sequences import Job, Sequence
from tinkercloud.errors import ServerFault

CHUNK = 512
"""Rows of one prompt in one step. Prompts are cut at its multiples: where a runner is not row
invariant, a cut that moved with the load would change the last bits of keys and values."""
SCORED_CHUNK = 128
"""The same where the logits of all rows are computed, which take (rows, V) memory."""
PREFILL_ROWS = 1024
"""Of all prompts in one step, about: samples that are decoded wait as long as these take."""


@dataclass(frozen=True, slots=True)
class KVCache:
    """The blocks of one base's sequences. is_reproducible: keys and values that are computed again
    have the same bits. Only then sequences share blocks, and a pre-empted sample keeps its tokens:
    else the tokens behind it would not follow from the keys and values before them."""

    pool: BlockPool
    is_reproducible: bool


class Scheduler:
    """Owns the queues, and the blocks of every sequence in them.

    max_batch: samples that run at once. max_begun: no prompt is begun while more samples than this
    run or are ready, so that prefill does not starve them. cache_of: the blocks of a base.
    on_discard: is called with a sample whose tokens are dropped, because it starts over or because
    its job failed.
    """

    def __init__(
        self,
        max_batch: int,
        max_begun: float,
        cache_of: Callable[[BaseModel], KVCache],
        on_discard: Callable[[Sequence], None],
    ):
        self._max_batch, self._max_begun = max_batch, max_begun
        self._cache_of, self._on_discard = cache_of, on_discard
        self._waiting: deque[Job] = deque()  # their prompts are not computed
        self._ready: deque[Job] = deque()  # with samples to begin
        self._running: list[Sequence] = []  # in the order of admission
        self.num_preempted = 0
        self.num_discarded = 0  # tokens of samples that started over

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._ready or self._running)

    @property
    def waiting(self) -> tuple[Job, ...]:
        return tuple(self._waiting)

    @property
    def ready(self) -> tuple[Job, ...]:
        return tuple(self._ready)

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    def add(self, job: Job) -> None:
        self._waiting.append(job)

    def clear(self) -> list[Job]:
        """Forget all jobs, without freeing their blocks; returns them."""
        jobs = {id(job): job for job in (*self._waiting, *self._ready)}
        jobs |= {id(sequence.job): sequence.job for sequence in self._running}
        self._waiting.clear()
        self._ready.clear()
        self._running.clear()
        return list(jobs.values())

    # ---- a step

    def schedule(self) -> list[BatchItem]:
        """What the next pass computes; blocks for it are reserved. Running samples come first,
        prompts get the blocks that these leave."""
        return [*self._decode_items(), *self._prefill_items()]

    def reserve_draft(self, sequence: Sequence, num_drafted: int) -> bool:
        """Blocks for drafted tokens behind the sample's own. False: there are not enough, and no
        sequence is pre-empted for tokens that may be rejected."""
        pool = self._cache_of(sequence.job.version.base).pool
        return sequence.reserve(pool, len(sequence.tokens) + num_drafted)

    def computed(self, item: BatchItem) -> None:
        """A pass computed the item."""
        cache = self._cache_of(item.base)
        item.sequence.advance(cache.pool, item.count, register=cache.is_reproducible)

    def accepted(self, sequence: Sequence, num_accepted: int) -> None:
        """So many drafted tokens follow those that were computed; the others' blocks are freed."""
        cache = self._cache_of(sequence.job.version.base)
        sequence.advance(cache.pool, num_accepted, register=cache.is_reproducible)
        sequence.free_excess(cache.pool)

    def prompt_computed(self, job: Job) -> None:
        """Its samples can begin."""
        self._waiting.remove(job)
        self._ready.append(job)

    def begin_samples(self) -> list[Sequence]:
        """Samples of ready jobs, as far as the batch and the blocks allow. They run from now on;
        their first token is drawn from their job's logits."""
        begun: list[Sequence] = []
        while self._ready and len(self._running) < self._max_batch:
            job = self._ready[0]
            if not self._has_room(job, job.num_prompt):
                break
            sample = self._next_sample(job)
            if sample is not None:
                job.next_sample += 1
                if not job.num_left:
                    self._ready.popleft()
                begun.append(sample)
                self._running.append(sample)
            elif self._running:
                break
            elif not self._take_blocks(job.version.base, job.prompt):
                self._fail(job, len(job.prompt.blocks) + 1)
        return begun

    def finish(self, samples: Iterable[Sequence]) -> None:
        """They are complete: free their blocks."""
        complete: set[int] = set()
        for sample in samples:
            complete.add(id(sample))
            sample.free_blocks(self._cache_of(sample.job.version.base).pool)
        if complete:
            self._running = [each for each in self._running if id(each) not in complete]

    def drop(self, job: Job) -> None:
        """Forget it, and free the blocks of its sequences."""
        pool = self._cache_of(job.version.base).pool
        for queue in (self._waiting, self._ready):
            if job in queue:
                queue.remove(job)
        for sequence in [s for s in (job.prompt, *self._running) if s.job is job]:
            sequence.free_blocks(pool)
            self._on_discard(sequence)
        self._running = [s for s in self._running if s.job is not job]

    # ---- what the next pass computes

    def _decode_items(self) -> list[BatchItem]:
        items: list[BatchItem] = []
        budget = PREFILL_ROWS  # of samples that compute their keys and values again
        for sequence in list(self._running):
            if sequence.job.has_failed:  # in this loop, for want of blocks for another sample
                continue
            if not sequence.blocks and not self._readmit(sequence):
                continue
            count = _chunk(sequence, CHUNK) if sequence.num_pending > 1 else 1
            if count > 1 and budget < count:
                continue
            if self._reserve(sequence, sequence.num_computed + count):
                items.append(BatchItem(sequence, count))
                budget -= count if count > 1 else 0
        return items

    def _readmit(self, sequence: Sequence) -> bool:
        """Whether a pre-empted sample computes its keys and values again; what others have cached
        of them is shared."""
        if not self._has_room(sequence.job, len(sequence.tokens)):
            return False
        cache = self._cache_of(sequence.job.version.base)
        if cache.is_reproducible:
            sequence.find_prefix(cache.pool)
        return True

    def _prefill_items(self) -> list[BatchItem]:
        items: list[BatchItem] = []
        num_rows = 0
        num_begun = len(self._running) + sum(job.num_left for job in self._ready)
        computing: set[Digest] = set()  # of blocks that this step computes
        for job in list(self._waiting):
            if num_rows >= PREFILL_ROWS or num_begun > self._max_begun:
                break
            sequence = job.prompt
            if not sequence.blocks and not self._share_prefix(job, computing):
                continue
            has_logits = job.scores is not None and job.scores.needs_logits
            count = _chunk(sequence, SCORED_CHUNK if has_logits and job.is_scoring else CHUNK)
            alone = not (items or self._running or self._ready)
            if not self._reserve_prompt(sequence, sequence.num_computed + count, alone=alone):
                break
            computing.update(sequence.digests[sequence.num_computed // BLOCK_TOKENS :])
            items.append(BatchItem(sequence, count))
            num_rows += count
            num_begun += job.num_left
        return items

    def _share_prefix(self, job: Job, computing: set[Digest]) -> bool:
        """Share the cached blocks of a prompt. False: another prompt computes the next of its
        blocks in this step, so it waits and shares that one too."""
        cache, prompt = self._cache_of(job.version.base), job.prompt
        # Scored rows need logits, which are not cached.
        if job.is_scoring or not cache.is_reproducible:
            return True
        job.cache_hit_tokens = prompt.find_prefix(cache.pool)
        missing = prompt.digests[len(prompt.blocks) :]
        if missing and missing[0] in computing:
            prompt.free_blocks(cache.pool)
            return False
        return True

    # ---- blocks

    def _reserve_prompt(self, prompt: Sequence, num_tokens: int, *, alone: bool) -> bool:
        """Blocks for that many tokens. Only where no sequence would go on without it a prompt
        takes blocks from others: else these become free without that."""
        if prompt.reserve(self._cache_of(prompt.job.version.base).pool, num_tokens):
            return True
        return alone and self._reserve(prompt, num_tokens)

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for that many tokens, taken from others if need be. False: not in this step; or
        never, and the job has failed."""
        base = sequence.job.version.base
        pool = self._cache_of(base).pool
        while not sequence.reserve(pool, num_tokens):
            if self._take_blocks(base, sequence):
                continue
            if any(s.blocks for s in self._sequences(base) if s is not sequence):
                if sequence.blocks:
                    self._preempt(sequence)
            else:
                self._fail(sequence.job, blocks_for(num_tokens))
            return False
        return True

    def _has_room(self, job: Job, num_tokens: int) -> bool:
        """Whether a sample of so many tokens can hope to reach its end. To begin one that cannot
        would take blocks from others, who would then take them back."""
        base = job.version.base
        pool = self._cache_of(base).pool
        num_others = sum(bool(s.blocks) for s in self._running if s.job.version.base is base)
        num_new = min(job.num_prompt + job.max_tokens - num_tokens, CHUNK)
        num_held = 0 if job.prompt.blocks else num_tokens
        return not num_others or pool.num_available >= num_others + blocks_for(num_held + num_new)

    def _take_blocks(self, base: BaseModel, needed_by: Sequence) -> bool:
        """Free the blocks of one that has any: a prompt, the youngest first, since no answer waits
        for it yet; else the youngest sample that is younger than `needed_by`."""
        pool = self._cache_of(base).pool
        for job in (*reversed(self._waiting), *reversed(self._ready)):
            if job.version.base is base and job.prompt.blocks and job.prompt is not needed_by:
                job.prompt.free_blocks(pool)
                if job in self._ready:
                    self._ready.remove(job)
                    self._waiting.appendleft(job)
                return True
        for sequence in reversed(self._running):
            if sequence is needed_by:
                return False
            if sequence.job.version.base is base and sequence.blocks:
                self._preempt(sequence)
                return True
        return False

    def _sequences(self, base: BaseModel) -> list[Sequence]:
        prompts = [job.prompt for job in (*self._waiting, *self._ready)]
        return [s for s in (*prompts, *self._running) if s.job.version.base is base]

    def _preempt(self, sequence: Sequence) -> None:
        """Free its blocks: it keeps its place in the queue, and computes keys and values again."""
        cache = self._cache_of(sequence.job.version.base)
        self.num_preempted += 1
        sequence.free_blocks(cache.pool)
        if not cache.is_reproducible:
            self.num_discarded += len(sequence.logprobs)
            self._on_discard(sequence)
            sequence.restart()

    def _next_sample(self, job: Job) -> Sequence | None:
        """None: there is no block for the copy of the prompt's last one."""
        if job.num_left == 1:
            job.prompt.index = job.next_sample  # the last sample needs no copy
            return job.prompt
        return job.prompt.fork(self._cache_of(job.version.base).pool, job.next_sample)

    def _fail(self, job: Job, num_blocks: int) -> None:
        """The job can never have so many blocks."""
        pool = self._cache_of(job.version.base).pool
        self.drop(job)
        job.fail(
            ServerFault(
                f"a sequence needs {num_blocks} blocks of keys and values and there are "
                f"{pool.num_blocks}; raise engine.kv_cache_bytes"
            )
        )


def _chunk(sequence: Sequence, limit: int) -> int:
    """Tokens up to the next multiple of `limit`."""
    return min(sequence.num_pending, limit - sequence.num_computed % limit)
