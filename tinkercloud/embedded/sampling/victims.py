"""Who gives way: which running samples pause in a step, and which lose their blocks. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable

from tinkercloud.embedded.sampling.sequences import Job, Sequence


def without_paused(running: list[Sequence], max_batch: int) -> list[Sequence]:
    """The samples that run in this step: all, or where more have begun than the batch holds,
    without the youngest of those users who have the most."""
    kept = Counter(sample.job.user for sample in running)
    for _ in range(len(running) - max_batch):
        kept[kept.most_common(1)[0][0]] -= 1
    batch: list[Sequence] = []
    for sample in running:
        if kept[sample.job.user]:
            kept[sample.job.user] -= 1
            batch.append(sample)
    return batch


def sample_to_preempt(
    running: list[Sequence], needed_by: Sequence, has_blocks: Callable[[Sequence], bool]
) -> Sequence | None:
    """For the blocks that a sequence needs: the youngest sample of its user that is younger, or of
    one who holds more blocks."""
    held: Counter[str] = Counter()
    for sample in running:
        held[sample.job.user] += len(sample.blocks)
    owner, is_older = needed_by.job.user, False
    for sample in reversed(running):
        is_older = is_older or sample is needed_by
        user = sample.job.user
        may_take = held[user] > held[owner] if user != owner else not is_older
        if may_take and has_blocks(sample):
            return sample
    return None


def prompt_to_free(
    jobs: Iterable[Job], needed_by: Sequence | None, has_blocks: Callable[[Sequence], bool]
) -> Job | None:
    """The first of these that has blocks to give: no answer waits for a prompt yet."""
    for job in jobs:
        if job.prompt is not needed_by and has_blocks(job.prompt):
            return job
    return None
