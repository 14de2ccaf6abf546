"""A scheduler without a model: its passes compute nothing and take the time that they are told."""

from dataclasses import dataclass

import torch

from tests.embedded.decode_scene import tiny_config
from tests.embedded.tiny import ask
from tinkercloud.architectures import load_architecture
from tinkercloud.core.types import SampleOutput
from tinkercloud.decoding.sampler import row_norms
from tinkercloud.decoding.stops import StopRule
from tinkercloud.embedded.forward.kv_blocks import BLOCK_TOKENS, BlockPool, blocks_for
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.sampling.batch_plan import BatchItem
from tinkercloud.embedded.sampling.block_reservation import KVCache
from tinkercloud.embedded.sampling.prompt_logprobs import PromptScores
from tinkercloud.embedded.sampling.scheduler import Scheduler
from tinkercloud.embedded.sampling.sequences import Job, Sequence


def bare_base(name: str = "bare", max_position_embeddings: int = 4096) -> BaseModel:
    """No weights: nothing is computed with it. 3,000 positions are read in the time of the products
    of a row, as with SmolLM2."""
    sizes = {"max_position_embeddings": max_position_embeddings, "intermediate_size": 2850}
    config, cpu = tiny_config("Llama", **sizes), torch.device("cpu")
    network = load_architecture(config.name)(config, cpu)
    return BaseModel(name, config, network, {}, None, torch.float32, cpu)


@dataclass(frozen=True)
class Computed:
    """An item of a pass, as it was when it was scheduled. start: positions before its first row.
    num_reads: positions that its rows read. written: the blocks of its rows."""

    sequence: Sequence
    is_prompt: bool
    start: int
    count: int
    num_reads: float
    written: list[int]

    @classmethod
    def of(cls, item: BatchItem) -> "Computed":
        sequence, end = item.sequence, item.sequence.num_computed + item.count
        num_reads = item.count * (sequence.num_computed + end) / 2
        written = sequence.blocks[sequence.num_computed // BLOCK_TOKENS : blocks_for(end)]
        start = sequence.num_computed
        return cls(sequence, sequence.is_prompt, start, item.count, num_reads, written)


class Bench:
    """A scheduler whose passes compute nothing: every sample's next token is 7. A pass takes
    step_ms, sample_ms for each sample, row_ms for each row of a prompt, read_ms for each position
    that it reads, and open_ms for each position before the first row of a prompt, as the scheduler
    is told. now_ms: of all passes."""

    def __init__(
        self,
        num_blocks: int = 1000,
        *,
        max_batch: int = 8,
        max_begun: float = 100.0,
        reproducible: bool = True,
        bases: tuple[BaseModel, ...] = (),
    ):
        self.step_ms, self.sample_ms = 1.0, 0.0
        self.row_ms, self.read_ms, self.open_ms = 0.0, 0.0, 0.0
        self.now_ms = 0.0
        self.bases = bases or (bare_base(),)
        self.caches = {
            id(base): KVCache(
                BlockPool(base.config, base.dtype, base.device, num_blocks), reproducible
            )
            for base in self.bases
        }
        self.discarded: list[Sequence] = []
        self.scheduler = Scheduler(
            max_batch, max_begun, lambda base: self.caches[id(base)], self.discarded.append
        )
        self.outcomes: dict[Job, SampleOutput | BaseException] = {}

    @property
    def pool(self) -> BlockPool:
        return self.caches[id(self.bases[0])].pool

    @property
    def num_held(self) -> int:
        return self.pool.num_blocks - self.pool.num_available

    def submit(
        self, prompt: list[int], n: int = 1, max_tokens: int = 8, base: int = 0, **more: object
    ) -> Job:
        version = Version(f"v{base}", self.bases[base], {}, None, 1.0)
        request = ask(prompt, n=n, max_tokens=max_tokens, use_eos=False, **more)
        scores = PromptScores(request, row_norms) if request.scores_prompt else None
        reply = lambda outcome: self.outcomes.__setitem__(job, outcome)  # noqa: E731
        job = Job(version, request, reply, scores, StopRule(request.params, (), None))
        self.scheduler.add(job)
        return job

    def step(self) -> list[Computed]:
        """One step of an engine; returns what it computed."""
        items = self.scheduler.schedule()
        computed = [Computed.of(item) for item in items]
        samples: list[Sequence] = []
        for item in items:
            ends = item.ends
            self.scheduler.computed(item)
            if ends and item.sequence.is_prompt:
                item.sequence.job.is_scoring = False
                self.scheduler.prompt_computed(item.sequence.job)
            elif ends:
                samples.append(item.sequence)
        self._write(samples)
        num_prompt_rows = sum(item.count for item in computed if item.is_prompt)
        num_reads = sum(item.num_reads for item in computed if item.is_prompt)
        ms = self.step_ms + self.row_ms * num_prompt_rows + self.read_ms * num_reads
        ms += self.open_ms * sum(item.start for item in computed if item.is_prompt)
        ms += self.sample_ms * sum(not item.is_prompt for item in computed)
        self.now_ms += ms
        self.scheduler.took(ms)
        self._write(self.scheduler.begin_samples())
        return computed

    def run(self, most: int = 5000) -> None:
        for _ in range(most):
            if not self.scheduler.is_busy:
                return
            self.step()
        raise AssertionError("it goes on for ever")

    def _write(self, samples: list[Sequence]) -> None:
        for sample in samples:
            sample.tokens.append(7)
            sample.logprobs.append(-1.0)
        complete = [sample for sample in samples if sample.num_left <= 0]
        self.scheduler.finish(complete)
        for sample in complete:
            sample.job.finish(sample, stopped=False)
