"""What a round of the sampling engine computes: tokens of sequences, and what is drawn from them.

Axes: W wanted rows, V vocabulary, M rows, L layers that a drafter reads, D hidden size.
"""

from collections.abc import Sequence as Several
from dataclasses import dataclass

from torch import Tensor

from tinkercloud.embedded.forward.batch import Part
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.sampling.sequences import Sequence


@dataclass(slots=True)
class DrawnRows:
    """A sample whose next tokens are drawn from some rows of the logits: one, and one more for each
    drafted token."""

    sequence: Sequence
    first: int
    drafted: tuple[int, ...] = ()
    hidden: Tensor | None = None  # (1 + drafted, L, D) after the tokens before them

    @property
    def rows(self) -> range:
        return range(self.first, self.first + 1 + len(self.drafted))


@dataclass(frozen=True, slots=True)
class BatchItem:
    """`count` more tokens of a sequence; all_rows: the logits of each are wanted. drafted: what may
    come after its last token; the logits after that and after each of these are wanted."""

    sequence: Sequence
    count: int
    drafted: tuple[int, ...] = ()

    @property
    def version(self) -> Version:
        return self.sequence.job.version

    @property
    def all_rows(self) -> bool:
        return self.sequence.index < 0 and self.sequence.job.is_scoring

    @property
    def ends(self) -> bool:
        return self.count == self.sequence.num_pending

    @property
    def is_decode(self) -> bool:
        return self.sequence.index >= 0 and self.sequence.num_pending == 1

    @property
    def num_rows(self) -> int:
        return self.count + len(self.drafted)

    @property
    def num_wanted(self) -> int:
        if self.all_rows:
            return self.count
        return 1 + len(self.drafted) if self.ends else 0

    @property
    def part(self) -> Part:
        sequence = self.sequence
        tokens = sequence.tokens[sequence.done : sequence.done + self.count]
        return Part(
            self.version, [*tokens, *self.drafted], sequence.done, sequence.blocks, self.num_wanted
        )


@dataclass(frozen=True, slots=True)
class LaunchedPass:
    """A pass of works that share weights and a runner, whose results are still to be taken, and may
    still be being computed. logits (W, V); hidden (M, L, D), where a drafter reads them."""

    works: Several[BatchItem]
    logits: Tensor
    hidden: Tensor | None
