"""The jobs and sequences that a scheduler has, by how far they are."""

from dataclasses import dataclass, field

from tinkercloud.embedded.fairness.virtual_counters import VirtualCounters
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.sampling.job_queues import JobQueues
from tinkercloud.embedded.sampling.sequences import Sequence


@dataclass(slots=True)
class Queues:
    """waiting: jobs whose prompts are not computed. ready: jobs with samples to begin. running:
    samples, in the order of admission. planned: sequences of the next pass. counters: what each
    user was given."""

    waiting: JobQueues = field(default_factory=JobQueues)
    ready: JobQueues = field(default_factory=JobQueues)
    running: list[Sequence] = field(default_factory=list[Sequence])
    planned: set[Sequence] = field(default_factory=set[Sequence])
    counters: VirtualCounters = field(default_factory=VirtualCounters)

    @property
    def users_of_prompts(self) -> set[str]:
        return {*self.waiting.users, *self.ready.users}

    def of_base(self, base: BaseModel) -> list[Sequence]:
        prompts = [job.prompt for job in (*self.waiting, *self.ready)]
        return [s for s in (*prompts, *self.running) if s.job.version.base is base]

    def clear(self) -> None:
        """What the next pass computes stays known until it is planned anew."""
        for each in (self.waiting, self.ready, self.running, self.counters):
            each.clear()
