"""Unfinished requests of the sampling engine, and their sequences."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tinkercloud.core.types import (
    OnTokens,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    StopReason,
    TokenChunk,
    Topk,
)
from tinkercloud.decoding.adjustment import adjustment_of
from tinkercloud.decoding.sampler import RowParams
from tinkercloud.decoding.stops import StopRule
from tinkercloud.embedded.forward.kv_blocks import (
    BLOCK_TOKENS,
    BlockPool,
    Digest,
    block_digests,
    blocks_for,
    digest_before,
)
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.sampling.prefill_budget import RowWork
from tinkercloud.embedded.sampling.prompt_logprobs import PromptScores
from tinkercloud.errors import UserError
from tinkercloud.grammar.compiler import SampleGrammar

Reply = Callable[[SampleOutput | BaseException], None]
TopkRow = tuple[np.ndarray, np.ndarray]


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, and the blocks with the keys and values of the first `num_computed` of them.

    With all but the last token computed, the next forward pass is one row. The scheduler changes
    blocks and counts, the postprocessor appends tokens.
    """

    job: "Job"
    index: int  # of the sample; -1 for the prompt, which all samples share
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    digests: list[Digest] = field(default_factory=list)
    num_registered: int = 0  # of its blocks: other sequences can find these
    logprobs: list[float] = field(default_factory=list)
    topk: list[TopkRow] = field(default_factory=list)
    num_streamed: int = 0  # of its sampled tokens: the request's stream has these
    committed: list[tuple[int, float, TopkRow | None]] = field(default_factory=list)
    grammar: SampleGrammar | None = None
    needs_logits: bool = False  # a pass could not draw its token itself

    @property
    def is_prompt(self) -> bool:
        return self.index < 0

    @property
    def num_pending(self) -> int:
        """Tokens without keys and values."""
        return len(self.tokens) - self.num_computed

    @property
    def num_left(self) -> int:
        """Tokens that a sample may still get."""
        return self.job.max_tokens - len(self.logprobs)

    @property
    def leaves_draft(self) -> bool:
        """Whether its last token is another one than its caller drafted, or comes after these."""
        drafted, num_sampled = self.job.request.drafted, len(self.logprobs)
        if not drafted or not num_sampled:
            return False
        return num_sampled > len(drafted) or self.tokens[-1] != drafted[num_sampled - 1]

    def reserve(self, pool: BlockPool, num_tokens: int) -> bool:
        """Blocks for that many tokens; False when there are not enough."""
        return pool.extend(self.blocks, num_tokens)

    def find_prefix(self, pool: BlockPool) -> int:
        """Share the blocks of its longest cached prefix, and copy what is cached of the next one;
        the number of tokens in them. The last token is always left to compute: its logits are
        needed."""
        assert not self.blocks
        self.digests = self._digests(self.tokens)
        self.blocks = pool.find(self.digests[: (len(self.tokens) - 1) // BLOCK_TOKENS])
        self.num_registered = len(self.blocks)
        self.num_computed = len(self.blocks) * BLOCK_TOKENS
        self._copy_beginning(pool)
        return self.num_computed

    def _copy_beginning(self, pool: BlockPool) -> None:
        """Of the block behind the shared ones, which was computed by who parts from it there."""
        start = self.num_computed
        tokens = self.tokens[start : min(start + BLOCK_TOKENS, len(self.tokens) - 1)]
        found = pool.find_beginning(self._digest_before(len(self.blocks)), tokens)
        if found is None:
            return
        block, num_tokens = found
        if (copied := pool.allocate(1)) is not None:
            pool.copy(block, copied[0])
            self.blocks += copied
            self.num_computed += num_tokens
        pool.free([block])

    def _digest_before(self, num_blocks: int) -> Digest:
        if num_blocks:
            return self.digests[num_blocks - 1]
        return digest_before(self.job.version.id, self.job.request.cache_salt)

    def _digests(self, tokens: list[int]) -> list[Digest]:
        salt = self.job.request.cache_salt
        return block_digests(self.job.version.id, salt, tokens, self.digests)

    def advance(self, pool: BlockPool, count: int, *, register: bool) -> None:
        """`count` more tokens are computed. register: other sequences can find full blocks."""
        self.num_computed += count
        if not register:
            return
        num_full = self.num_computed // BLOCK_TOKENS
        if num_full > len(self.digests):
            self.digests = self._digests(self.tokens[: self.num_computed])
        for i in range(self.num_registered, num_full):
            pool.register(self.blocks[i], self.job.version.id, self.digests[i])
            self._register_beginning(pool, i)
        self.num_registered = max(self.num_registered, num_full)

    def free_excess(self, pool: BlockPool) -> None:
        """Free the blocks beyond its tokens: they were reserved for drafted tokens that were
        rejected."""
        num_needed = blocks_for(len(self.tokens))
        if len(self.blocks) > num_needed:
            pool.free(self.blocks[num_needed:])
            del self.blocks[num_needed:]

    def fork(self, pool: BlockPool, index: int) -> "Sequence | None":
        """A sample that continues this prompt: full blocks are shared, the last one is copied,
        since the sample writes to it. None when there is no block for the copy."""
        num_full = self.num_computed // BLOCK_TOKENS
        tail: list[int] = []
        if self.num_computed % BLOCK_TOKENS:
            allocated = pool.allocate(1)
            if allocated is None:
                return None
            pool.copy(self.blocks[num_full], allocated[0])
            tail = allocated
        pool.acquire(self.blocks[:num_full])
        blocks = self.blocks[:num_full] + tail
        sample = Sequence(self.job, index, list(self.tokens), blocks, self.num_computed)
        sample.digests, sample.num_registered = list(self.digests), self.num_registered
        return sample

    def free_blocks(self, pool: BlockPool, *, register: bool) -> None:
        """register: who continues its tokens finds what is computed of the last block too."""
        if register and self.num_computed % BLOCK_TOKENS:
            self._register_beginning(pool, self.num_computed // BLOCK_TOKENS)
        pool.free(self.blocks)
        self.blocks, self.num_computed, self.num_registered = [], 0, 0

    def _register_beginning(self, pool: BlockPool, index: int) -> None:
        """Of one of its blocks: the tokens that are computed of it."""
        end = min((index + 1) * BLOCK_TOKENS, self.num_computed)
        tokens = self.tokens[index * BLOCK_TOKENS : end]
        before = self._digest_before(index)
        pool.register_beginning(self.blocks[index], self.job.version.id, before, tokens)

    def restart(self) -> None:
        """Drop the sampled tokens: the noise is keyed by position, so that the same are drawn
        again, but for rounding. What a stream has cannot be taken back: those tokens are committed.
        """
        num_prompt = self.job.num_prompt
        if len(self.committed) < self.num_streamed <= len(self.logprobs):
            sampled = self.tokens[num_prompt:]
            rows = self.topk or [None] * len(sampled)
            tokens = list(zip(sampled, self.logprobs, rows, strict=True))
            self.committed = tokens[: self.num_streamed]
        del self.tokens[num_prompt:]
        self.digests = self.digests[: num_prompt // BLOCK_TOKENS]
        self.logprobs.clear()
        self.topk.clear()
        self.grammar = None

    def overwrite(self, tokens: list[int], logprobs: list[float], rows: range) -> None:
        """Put its committed tokens in place of those that were drawn in `rows`."""
        num_sampled = len(self.logprobs)
        for row, entry in zip(rows, self.committed[num_sampled:], strict=False):
            tokens[row], logprobs[row], _ = entry

    def stream(self, stop_reason: StopReason | None) -> None:
        """Hand the tokens that its request's stream does not have to it."""
        first, on_tokens = self.num_streamed, self.job.on_tokens
        if on_tokens is None or len(self.logprobs) <= first:
            return
        self.num_streamed = len(self.logprobs)
        tokens = np.array(self.tokens[self.job.num_prompt + first :], np.int32)
        logprobs = np.array(self.logprobs[first:], np.float32)
        on_tokens(TokenChunk(self.index, tokens, logprobs, stop_reason, _stack(self.topk[first:])))

    def _allowed(self) -> Tensor | None:
        """What its grammar takes next, bool (V,). A grammar that cannot be followed is an error of
        its job, which ends with the step; until then it allows everything."""
        if self.job.begin_grammar is None:
            return None
        if self.grammar is None:
            self.grammar = self.job.begin_grammar()
        try:
            return torch.from_numpy(self.grammar.allowed())
        except UserError as error:
            self.job.error = error
            return None

    def row_params(self, ahead: int = 0) -> RowParams:
        """Of the token that is drawn next, or `ahead` after it where its job takes drafts."""
        params = self.job.request.params
        # Copied only where it is read: this runs for every token of every sample.
        sampled = self.tokens[self.job.num_prompt :] if params.has_penalties else ()
        adjustment = adjustment_of(params, sampled, self._allowed())
        assert adjustment is None or not ahead, "the tokens between are not known"
        return RowParams(params, self.index, len(self.tokens) + ahead, adjustment)


@dataclass(slots=True, eq=False)
class Job:
    """An unfinished request: its prompt, then its samples."""

    version: Version
    request: SampleRequest
    reply: Reply
    scores: PromptScores | None
    stop_rule: StopRule
    on_tokens: OnTokens | None = None
    begin_grammar: Callable[[], SampleGrammar] | None = None  # for each sample
    prompt: Sequence = field(init=False)
    row_work: RowWork = field(init=False)
    draws_whole: bool = field(init=False)  # tokens follow from logits alone, which nobody asks for
    is_scoring: bool = field(init=False)  # all rows of the prompt are wanted, and not all computed
    has_failed: bool = False
    error: UserError | None = None  # that it is to fail with once the step is over
    logits: Tensor | None = None  # (1 + verified, V) after the whole prompt
    hidden: Tensor | None = None  # (n, L, D) of its last tokens, where a drafter reads them
    cache_hit_tokens: int = 0
    next_sample: int = 0
    samples: dict[int, SampledSequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prompt = Sequence(self, -1, self.request.prompt.tolist())
        self.row_work = RowWork(self.version.base.config.attention_span)
        self.is_scoring = self.scores is not None
        request, params = self.request, self.request.params
        is_adjusted = request.grammar is not None or params.has_penalties
        asks_more = is_adjusted or request.topk_sample_logprobs > 0
        self.draws_whole = not asks_more and RowParams(params, 0, 0).is_whole

    @property
    def user(self) -> str:
        return self.request.user

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def takes_drafts(self) -> bool:
        """Not where a token's distribution follows from all those before it: a draft would need a
        distribution of its own for each of its tokens."""
        request = self.request
        return request.speculate and request.grammar is None and not request.params.has_penalties

    @property
    def drafted(self) -> tuple[int, ...]:
        """The caller's draft, where it can be verified in the prompt's last pass."""
        request = self.request
        is_one = request.num_samples == 1 and self.scores is None
        can_verify = is_one and request.grammar is None and not request.params.has_penalties
        return request.drafted[: self.max_tokens - 1] if can_verify else ()

    @property
    def num_left(self) -> int:
        """Samples that have not begun."""
        return self.request.num_samples - self.next_sample

    @property
    def max_tokens(self) -> int:
        num_free = self.version.base.config.max_position_embeddings - self.num_prompt
        limit = self.request.params.max_tokens
        return num_free if limit is None else min(limit, num_free)

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

    def fail(self, error: BaseException) -> None:
        self.has_failed = True
        self.reply(error)

    def _output(self) -> SampleOutput:
        scores = self.scores
        return SampleOutput(
            sequences=tuple(self.samples[i] for i in range(self.request.num_samples)),
            prompt_logprobs=scores.logprobs if scores else None,
            topk_prompt_logprobs=scores.topk if scores else None,
            target_prompt_logprobs=scores.target_logprobs if scores else None,
            prompt_alt_tokens=scores.alt_tokens if scores else None,
            prompt_cache_hit_tokens=self.cache_hit_tokens,
        )


def _stack(rows: list[TopkRow]) -> Topk | None:
    if not rows:
        return None
    return Topk(np.concatenate([r[0] for r in rows]), np.concatenate([r[1] for r in rows]))
