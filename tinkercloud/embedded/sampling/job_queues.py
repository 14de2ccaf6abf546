"""Jobs by user, each user's in their order; what is done to one job costs the same among ten
thousand."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from tinkercloud.embedded.sampling.sequences import Job


class JobQueues:
    """A queue for each user."""

    def __init__(self) -> None:
        self._queues: dict[str, OrderedDict[Job, None]] = {}
        self._num_jobs = 0

    def __len__(self) -> int:
        return self._num_jobs

    def __iter__(self) -> Iterator[Job]:
        for queue in self._queues.values():
            yield from queue

    def __contains__(self, job: Job) -> bool:
        return job in self._queues.get(job.user, ())

    @property
    def users(self) -> Iterable[str]:
        """With jobs here."""
        return self._queues.keys()

    def of(self, user: str) -> Iterator[Job]:
        return iter(self._queues.get(user, ()))

    def youngest_first(self, user: str) -> Iterator[Job]:
        return reversed(self._queues.get(user, OrderedDict()))

    def first(self, user: str) -> Job:
        return next(self.of(user))

    def append(self, job: Job) -> None:
        self._queues.setdefault(job.user, OrderedDict())[job] = None
        self._num_jobs += 1

    def append_first(self, job: Job) -> None:
        self.append(job)
        self._queues[job.user].move_to_end(job, last=False)

    def remove(self, job: Job) -> None:
        queue = self._queues[job.user]
        del queue[job]
        self._num_jobs -= 1
        if not queue:
            del self._queues[job.user]

    def clear(self) -> None:
        self._queues.clear()
        self._num_jobs = 0
