"""Admission and planning: which tokens the next step computes, in which blocks
(`block_reservation.py`).

A job waits until its prompt is computed; then it is ready, and its samples begin as far as the
batch and the blocks allow; running samples get their next token in every step. A sequence is tokens
of which some have their keys and values in blocks; a step brings it as many forward as the budget
allows. So a prompt, a sample that is decoded, and a sample that lost its blocks and computes them
again are scheduled alike.

Between users, the one who was given the fewest tokens is next: with a prompt, a place in the batch,
and blocks. Prompts have a small budget beside other users' samples, and steps are short beside
other users' training. Which bits a sample gets does not depend on any of that.

Needs no model: what it knows of a base is its `KVCache`.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Set
from itertools import islice

from tinkercloud.embedded.forward.kv_blocks import BLOCK_TOKENS, Digest
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.sampling.batch_plan import BatchItem
from tinkercloud.embedded.sampling.block_reservation import BlockReservation, KVCache
from tinkercloud.embedded.sampling.prefill_budget import Place, PrefillBudget
from tinkercloud.embedded.sampling.queues import Queues
from tinkercloud.embedded.sampling.sequences import Job, Sequence
from tinkercloud.embedded.sampling.step_length import StepLength
from tinkercloud.embedded.sampling.victims import without_paused
from tinkercloud.errors import ServerFault

CHUNK = 512
"""Rows of one prompt in one step. Prompts are cut at its multiples: where a runner is not row
invariant, a cut that moved with the load would change the last bits of keys and values."""
SCORED_CHUNK = 128
"""The same where the logits of all rows are computed, which take (rows, V) memory."""
PREFILL_ROWS = 1024
"""Of all prompts in one step, at most: samples that are decoded wait as long as these take."""
LOOKAHEAD = 128
"""Jobs of one user that a step considers: each may wait for a prefix that another computes."""


class Scheduler:
    """Owns the queues, and the blocks of every sequence in them.

    max_batch: samples that run at once. max_begun: no prompt is begun while more samples than this
    run or are ready, so that prefill does not starve them. cache_of: the blocks of a base.
    on_discard: is called with a sample whose tokens are dropped, because it starts over or because
    its job failed. who_trains: as of `SamplingEngine.yield_to`.
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
        self._jobs: dict[Job, None] = {}  # that are unfinished
        self._queues = Queues()
        self._counters = self._queues.counters
        self._blocks = BlockReservation(self._queues, cache_of, on_discard, self._fail)
        self._budget = PrefillBudget(PREFILL_ROWS)
        self._length = StepLength()
        self.who_trains: Callable[[], Set[str]] = frozenset
        self._decoding: Counter[str] = Counter()  # its samples that get a token, by user

    @property
    def is_busy(self) -> bool:
        return bool(self._jobs)

    @property
    def num_preempted(self) -> int:
        return self._blocks.num_preempted

    @property
    def num_discarded(self) -> int:
        """Tokens of samples that started over."""
        return self._blocks.num_discarded

    @property
    def num_waiting(self) -> int:
        """Requests whose samples have not all begun."""
        return len(self._queues.waiting) + len(self._queues.ready)

    @property
    def waiting(self) -> tuple[Job, ...]:
        return tuple(self._queues.waiting)

    @property
    def ready(self) -> tuple[Job, ...]:
        return tuple(self._queues.ready)

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._queues.running)

    def add(self, job: Job) -> None:
        self._jobs[job] = None
        self._counters.enter(job.user)
        self._queues.waiting.append(job)

    def clear(self) -> list[Job]:
        """Forget all jobs, without freeing their blocks; returns them."""
        jobs = list(self._jobs)
        self._jobs.clear()
        self._queues.clear()
        return jobs

    # ---- a step

    def schedule(self) -> list[BatchItem]:
        """What the next pass computes; blocks for it are reserved. Running samples come first,
        prompts get the blocks that these leave."""
        self._queues.planned.clear()
        self._length.begin(is_short=self._is_waited_for())
        batch = self._length.samples(
            without_paused(self._queues.running, self._max_batch),
            prompts_wait=bool(self._queues.waiting),
        )
        self._decoding = Counter(s.job.user for s in batch if s.num_pending == 1 and s.blocks)
        self._budget.begin(self._decoding.total(), is_alone=self._counters.num_users == 1)
        return [*self._decode_items(batch), *self._prefill_items()]

    def took(self, ms: float) -> None:
        """The pass that was scheduled last is over."""
        self._budget.took(ms)
        self._length.took(ms)

    def _is_waited_for(self) -> bool:
        """Whether somebody trains who is not the only one to sample."""
        trains = self.who_trains()
        return bool(trains) and len(trains | self._counters.users) > 1

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
        self._queues.waiting.remove(job)
        self._queues.ready.append(job)

    def begin_samples(self) -> list[Sequence]:
        """Samples of ready jobs, as far as the batch and the blocks allow. They run from now on;
        their first token is drawn from their job's logits."""
        self._queues.planned.clear()
        begun: list[Sequence] = []
        while (user := self._next_to_begin()) is not None:
            job = self._queues.ready.first(user)
            if not self._blocks.make_room(job, job.num_prompt, CHUNK):
                break
            sample = self._next_sample(job)
            if sample is not None:
                job.next_sample += 1
                if not job.num_left:
                    self._queues.ready.remove(job)
                begun.append(sample)
                self._queues.running.append(sample)
                self._counters.charge(user, 1)
            elif self._queues.running:
                break
            elif not self._blocks.take_blocks(job.version.base, job.prompt):
                self._fail(job, len(job.prompt.blocks) + 1)
        return begun

    def _next_to_begin(self) -> str | None:
        """The user whose sample begins next: where the batch is full, one who has less than an
        equal share of it, and others' youngest samples pause."""
        if len(self._queues.running) < self._max_batch:
            return self._counters.next_of(self._queues.ready.users)
        share = self._max_batch // max(self._counters.num_users, 1)
        running = Counter(sample.job.user for sample in self._queues.running)
        return self._counters.next_of(u for u in self._queues.ready.users if running[u] < share)

    def finish(self, samples: Iterable[Sequence]) -> None:
        """They are complete: free their blocks."""
        complete = set(samples)
        if not complete:
            return
        for sample in complete:
            cache = self._cache_of(sample.job.version.base)
            sample.free_blocks(cache.pool, register=cache.is_reproducible)
        self._queues.running = [each for each in self._queues.running if each not in complete]
        running = {each.job for each in self._queues.running}
        for job in {sample.job for sample in complete} - running:
            if not job.num_left:
                self._forget(job)

    def drop(self, job: Job) -> None:
        """Forget it, and free the blocks of its sequences."""
        cache = self._cache_of(job.version.base)
        for queue in (self._queues.waiting, self._queues.ready):
            if job in queue:
                queue.remove(job)
        self._forget(job)
        for sequence in [s for s in (job.prompt, *self._queues.running) if s.job is job]:
            sequence.free_blocks(cache.pool, register=cache.is_reproducible)
            self._on_discard(sequence)
        self._queues.running = [s for s in self._queues.running if s.job is not job]

    def _forget(self, job: Job) -> None:
        if job in self._jobs:
            del self._jobs[job]
            self._counters.leave(job.user)

    # ---- what the next pass computes

    def _decode_items(self, batch: list[Sequence]) -> list[BatchItem]:
        items: list[BatchItem] = []
        for sequence in batch:
            if sequence.job.has_failed:  # in this loop, for want of blocks for another sample
                continue
            if not sequence.blocks and not self._readmit(sequence):
                continue
            # More than one: a sample that computes its keys and values again.
            count = self._num_rows(sequence, CHUNK) if sequence.num_pending > 1 else 1
            if count and self._blocks.reserve(sequence, sequence.num_computed + count):
                items.append(self._plan(sequence, count))
        return items

    def _plan(self, sequence: Sequence, count: int) -> BatchItem:
        """The item, on its user's account."""
        work, start = sequence.job.row_work, sequence.num_computed
        if sequence.is_prompt or sequence.num_pending > 1:
            self._budget.take(work, start, count, self._place_of(sequence.job.user))
        self._length.add(work.of(start, count))
        self._counters.charge(sequence.job.user, work.of(start, count))
        self._queues.planned.add(sequence)
        return BatchItem(sequence, count)

    def _num_rows(self, sequence: Sequence, chunk: int) -> int:
        """Rows of a prompt, or of a sample that computes its keys and values again, in this step:
        up to the next multiple of `chunk`, within what is left for its user."""
        start = sequence.num_computed
        most = min(sequence.num_pending, chunk - start % chunk)
        place = self._place_of(sequence.job.user)
        work_left = self._length.work_left
        rows = self._budget.rows(sequence.job.row_work, start, most, place, work_left)
        if self._cache_of(sequence.job.version.base).is_reproducible:
            return rows
        return most if rows else 0

    def _place_of(self, user: str) -> Place:
        if not self._counters.is_least_served(user):
            return Place.OTHER
        is_only = self._decoding[user] == self._decoding.total()
        return Place.UNDISTURBING if is_only else Place.NEXT

    def _readmit(self, sequence: Sequence) -> bool:
        """Whether a pre-empted sample computes its keys and values again; what others have cached
        of them is shared."""
        if not self._blocks.make_room(sequence.job, len(sequence.tokens), CHUNK):
            return False
        cache = self._cache_of(sequence.job.version.base)
        if cache.is_reproducible:
            sequence.find_prefix(cache.pool)
        return True

    def _prefill_items(self) -> list[BatchItem]:
        items: list[BatchItem] = []
        begun = Counter(sample.job.user for sample in self._queues.running)
        for job in self._queues.ready:
            begun[job.user] += job.num_left
        computing: set[Digest] = set()  # of blocks that this step computes
        waiting = {
            u: deque(islice(self._queues.waiting.of(u), LOOKAHEAD))
            for u in self._queues.waiting.users
        }
        while (user := self._counters.next_of(waiting)) is not None:
            if not waiting[user] or not self._may_begin(user, begun):
                del waiting[user]
                continue
            job = waiting[user].popleft()
            sequence = job.prompt
            if not sequence.blocks and not self._share_prefix(job, computing):
                continue
            has_logits = job.scores is not None and job.scores.needs_logits
            count = self._num_rows(
                sequence, SCORED_CHUNK if has_logits and job.is_scoring else CHUNK
            )
            if not count or not self._blocks.reserve_prompt(
                sequence, sequence.num_computed + count
            ):
                del waiting[user]
                continue
            computing.update(sequence.digests[sequence.num_computed // BLOCK_TOKENS :])
            items.append(self._plan(sequence, count))
            begun[user] += job.num_left
        return items

    def _may_begin(self, user: str, begun: "Counter[str]") -> bool:
        """begun: samples that run or are ready, by user."""
        share = self._max_begun / self._counters.num_users
        return begun.total() <= self._max_begun or begun[user] <= share

    def _share_prefix(self, job: Job, computing: set[Digest]) -> bool:
        """Share the cached blocks of a prompt. False: another prompt computes the next of its
        blocks in this step, so it waits and shares that one too."""
        cache, prompt = self._cache_of(job.version.base), job.prompt
        # Scored rows need logits, which are not cached.
        if job.is_scoring or not cache.is_reproducible:
            return True
        job.cache_hit_tokens = prompt.find_prefix(cache.pool)
        missing = prompt.digests[prompt.num_computed // BLOCK_TOKENS :]
        if missing and missing[0] in computing:
            prompt.free_blocks(cache.pool, register=False)
            return False
        return True

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
