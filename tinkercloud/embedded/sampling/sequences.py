"""What the sampling engine keeps of requests underway."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tinkercloud.core.types import SampledSequence, SampleOutput, SampleRequest, Topk
from tinkercloud.decoding.sampler import RowParams
from tinkercloud.decoding.stops import StopRule
from tinkercloud.embedded.forward.kv_blocks import (
    BLOCK_TOKENS,
    BlockPool,
    Digest,
    blocks_for,
    chain,
)
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.sampling.prompt_logprobs import PromptScores

Reply = Callable[[SampleOutput | BaseException], None]


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, and the blocks with the keys and values of the first `done` of them.

    Where all but the last one are done, the next forward pass is one row.
    """

    job: "Job"
    index: int  # of the sample; -1 for the prompt, which all samples share
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    done: int = 0
    digests: list[Digest] = field(default_factory=list)
    num_named: int = 0  # blocks that others can find
    logprobs: list[float] = field(default_factory=list)
    topk: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.done

    @property
    def num_left(self) -> int:
        """Tokens of a sample that it may still have."""
        return self.job.max_tokens - len(self.logprobs)

    def reserve(self, pool: BlockPool, num_tokens: int) -> bool:
        """Blocks for that many tokens; False when there are not enough."""
        return pool.extend(self.blocks, num_tokens)

    def look_up(self, pool: BlockPool) -> int:
        """Use what is known of its beginning; the number of its tokens. One token stays to do."""
        assert not self.blocks
        self.digests = chain(self.job.version.id, self.tokens, self.digests)
        self.blocks = pool.find(self.digests[: (len(self.tokens) - 1) // BLOCK_TOKENS])
        self.num_named = len(self.blocks)
        self.done = len(self.blocks) * BLOCK_TOKENS
        return self.done

    def advance(self, pool: BlockPool, count: int, *, named: bool) -> None:
        """`count` more tokens are done; named: full blocks can be found by others."""
        self.done += count
        if not named:
            return
        full = self.done // BLOCK_TOKENS
        if full > len(self.digests):
            self.digests = chain(self.job.version.id, self.tokens[: self.done], self.digests)
        for i in range(self.num_named, full):
            pool.name(self.blocks[i], self.job.version.id, self.digests[i])
        self.num_named = max(self.num_named, full)

    def give_back(self, pool: BlockPool) -> None:
        """Blocks beyond what its tokens take: they were for drafted ones that do not stand."""
        needed = blocks_for(len(self.tokens))
        if len(self.blocks) > needed:
            pool.drop(self.blocks[needed:])
            del self.blocks[needed:]

    def fork(self, pool: BlockPool, index: int) -> "Sequence | None":
        """A sample that goes on from this prompt: full blocks are shared, the last one is copied.
        None when there is no block for the copy."""
        full = self.done // BLOCK_TOKENS
        own: list[int] = []
        if self.done % BLOCK_TOKENS:
            taken = pool.take(1)
            if taken is None:
                return None
            pool.copy(self.blocks[full], taken[0])
            own = taken
        pool.hold(self.blocks[:full])
        copy = Sequence(self.job, index, list(self.tokens), self.blocks[:full] + own, self.done)
        copy.digests, copy.num_named = list(self.digests), self.num_named
        return copy

    def drop_blocks(self, pool: BlockPool) -> None:
        pool.drop(self.blocks)
        self.blocks, self.done, self.num_named = [], 0, 0

    def start_over(self, num_prompt: int) -> None:
        """Forget what was sampled: the same will be sampled again."""
        del self.tokens[num_prompt:]
        self.digests = self.digests[: num_prompt // BLOCK_TOKENS]
        self.logprobs.clear()
        self.topk.clear()

    def row_params(self, ahead: int = 0) -> RowParams:
        """Of the token that is drawn next, or so many after it."""
        return RowParams(self.job.request.params, self.index, len(self.tokens) + ahead)


@dataclass(slots=True, eq=False)
class Job:
    """A request underway: its prompt, then its samples."""

    version: Version
    request: SampleRequest
    reply: Reply
    scores: PromptScores | None
    stop_rule: StopRule
    prompt: Sequence = field(init=False)
    is_scoring: bool = field(init=False)  # all rows of the prompt are wanted, and not done
    logits: Tensor | None = None  # (V,) after the whole prompt
    hidden: Tensor | None = None  # (n, L, D) of its last tokens, where a drafter reads them
    cache_hit_tokens: int = 0
    next_sample: int = 0
    samples: dict[int, SampledSequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prompt = Sequence(self, -1, self.request.prompt.tolist())
        self.is_scoring = self.scores is not None

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_left(self) -> int:
        """Samples that have not begun."""
        return self.request.num_samples - self.next_sample

    @property
    def max_tokens(self) -> int:
        room = self.version.base.config.max_position_embeddings - self.num_prompt
        wanted = self.request.params.max_tokens
        return room if wanted is None else min(wanted, room)

    def finish(self, sequence: Sequence, *, stopped: bool) -> None:
        """Keep a sample; with the last one, answer."""
        self.samples[sequence.index] = SampledSequence(
            tokens=np.array(sequence.tokens[self.num_prompt :], np.int32),
            logprobs=np.array(sequence.logprobs, np.float32),
            stop_reason="stop" if stopped else "length",
            topk=_stack(sequence.topk),
        )
        if len(self.samples) == self.request.num_samples:
            self.reply(self._output())

    def _output(self) -> SampleOutput:
        scores = self.scores
        return SampleOutput(
            sequences=tuple(self.samples[i] for i in range(self.request.num_samples)),
            prompt_logprobs=scores.logprobs if scores else None,
            topk_prompt_logprobs=scores.topk if scores else None,
            target_prompt_logprobs=scores.target_logprobs if scores else None,
            prompt_cache_hit_tokens=self.cache_hit_tokens,
        )


def _stack(rows: list[tuple[np.ndarray, np.ndarray]]) -> Topk | None:
    if not rows:
        return None
    return Topk(np.concatenate([r[0] for r in rows]), np.concatenate([r[1] for r in rows]))
