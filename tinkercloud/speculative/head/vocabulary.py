"""The part of the target's vocabulary that a draft head can say.

A small model spends a large share of a step on the unembedding; a few thousand frequent tokens make
nearly all of a text (FR-Spec, 2502.14856). The others cannot be drafted, only emitted.

Axes: V vocabulary of the target, Vd of the draft.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """ids int64 (Vd,): the target's id of each draft id, ascending, so that ties are decided as the
    target decides them. index int64 (V,): the draft's id of each of the target's, -1 for none."""

    ids: Tensor
    index: Tensor

    @classmethod
    def of(cls, ids: Collection[int], vocab_size: int) -> "DraftVocabulary":
        """Raises ValueError for ids that the target does not have, and for none at all."""
        kept = torch.tensor(sorted(set(ids)), dtype=torch.int64)
        if not len(kept) or kept[0] < 0 or kept[-1] >= vocab_size:
            raise ValueError(f"a draft vocabulary is made of ids from 0 to {vocab_size - 1}")
        index = torch.full((vocab_size,), -1, dtype=torch.int64)
        index[kept] = torch.arange(len(kept))
        return cls(kept, index)

    @classmethod
    def most_frequent(
        cls, counts: Tensor, size: int, always: Collection[int] = ()
    ) -> "DraftVocabulary":
        """counts (V,): how often each token was seen; of equals the lower id. always: ids that are
        kept whatever their count, such as the end of a text."""
        kept = list(dict.fromkeys(always))[:size]
        order = torch.sort(counts, descending=True, stable=True).indices.tolist()
        chosen = set(kept)
        kept += [i for i in order if i not in chosen][: size - len(kept)]
        return cls.of(kept, len(counts))

    def on(self, device: torch.device) -> Self:
        """The same there."""
        return type(self)(self.ids.to(device), self.index.to(device))

    def __len__(self) -> int:
        return len(self.ids)

    def coverage(self, counts: Tensor) -> float:
        """The share of the tokens counted (V,) that the draft can say."""
        total = float(counts.sum())
        return float(counts[self.ids].sum()) / total if total > 0 else 0.0
