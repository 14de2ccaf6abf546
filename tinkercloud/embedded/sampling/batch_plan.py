"""What one step of the sampling engine computes: tokens of sequences, and the rows that tokens are
drawn from.

Axes: W rows with logits, V vocabulary, M rows, L layers that a drafter reads, D hidden size.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from tinkercloud.decoding.sampler import Candidates, RowParams
from tinkercloud.embedded.forward.batch import RowScores, SequenceRows
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.sampling.prompt_logprobs import PromptScores, ScoredRows
from tinkercloud.embedded.sampling.sequences import Sequence


@dataclass(frozen=True, slots=True)
class BatchItem:
    """`count` more tokens of a sequence. drafted: proposals for what comes after its last token;
    logits are computed after that token and after each drafted one. drawn_with: the pass draws
    what comes after these, and keeps these rows' logits where `keeps_logits`."""

    sequence: Sequence
    count: int
    drafted: tuple[int, ...] = ()
    drawn_with: tuple[RowParams, ...] = ()
    keeps_logits: bool = False

    @property
    def version(self) -> Version:
        return self.sequence.job.version

    @property
    def base(self) -> BaseModel:
        return self.sequence.job.version.base

    @property
    def all_rows(self) -> bool:
        """Whether the logits of every row are computed, not of the last ones only."""
        scores = self._scores
        return scores is not None and scores.needs_logits

    @property
    def _scores(self) -> PromptScores | None:
        """Where its rows are to be scored."""
        job = self.sequence.job
        return job.scores if self.sequence.is_prompt and job.is_scoring else None

    @property
    def targets(self) -> ScoredRows | None:
        """What is scored without logits."""
        scores = self._scores
        if scores is None or scores.needs_logits:
            return None
        return scores.rows(self.sequence.num_computed, self.count)

    @property
    def ends(self) -> bool:
        """Whether it computes all that is pending."""
        return self.count == self.sequence.num_pending

    @property
    def is_decode(self) -> bool:
        return not self.sequence.is_prompt and self.sequence.num_pending == 1

    @property
    def num_rows(self) -> int:
        return self.count + len(self.drafted)

    @property
    def num_logit_rows(self) -> int:
        if self.all_rows:
            return self.count
        if self.drawn_with:
            return 0
        return 1 + len(self.drafted) if self.ends else 0

    @property
    def rows(self) -> SequenceRows:
        sequence = self.sequence
        start = sequence.num_computed
        tokens = [*sequence.tokens[start : start + self.count], *self.drafted]
        rows = SequenceRows(
            *(self.version, tokens, start, sequence.blocks, self.num_logit_rows),
            drawn_with=self.drawn_with,
            keeps_logits=self.keeps_logits,
        )
        targets = self.targets
        if targets is None:
            return rows
        return replace(rows, first_scored=targets.first - start, targets=targets.ids)


@dataclass(frozen=True, slots=True)
class LaunchedPass:
    """A pass over items that share weights and a runner. It may still be running on the device.
    logits (W, V); hidden (M, L, D), where a drafter reads them; scores of all items' targets;
    candidates of items that the pass drew from."""

    items: list[BatchItem]
    logits: Tensor
    hidden: Tensor | None
    scores: RowScores | None = None
    candidates: Candidates | None = None


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """The rows of some logits that a sample's next tokens are drawn from: one, and one more for
    each drafted token."""

    sequence: Sequence
    first: int
    drafted: tuple[int, ...] = ()
    hidden: Tensor | None = None  # (1 + drafted, L, D) after the tokens before them

    @property
    def rows(self) -> range:
        return range(self.first, self.first + 1 + len(self.drafted))
