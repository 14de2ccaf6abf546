"""What samples that ask for details tell of their drafts: every place where draft and target
disagreed. One line of JSON for each sample, in a file of bounded size.

It is read off what rounds compute anyway, so that a sample's tokens are those of one without
details; looking at a distribution costs time."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from tinkercloud.embedded.sampling.sequences import Sequence as Sample
from tinkercloud.speculative.drafters.drafter import Draft

TOP = 8  # of the target's most probable tokens
MAX_BYTES = 64 * 1024**2  # of the file; then it begins anew, and one before it stays


@dataclass(frozen=True, slots=True)
class Verdict:
    """A sample's draft in one round. num_judged: its tokens with a verdict, one at least; position:
    the last one's, in the sample's tokens. distribution: the target's probabilities there, (1, V).
    """

    draft: Draft
    num_judged: int
    num_accepted: int
    position: int
    distribution: Callable[[], Tensor]


@dataclass(slots=True)
class _Record:
    num_judged: int = 0
    num_accepted: int = 0
    disagreements: list[dict[str, Any]] = field(default_factory=list)


class DetailedLog:
    """Owned by the thread that samples."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._max_bytes = path, max_bytes
        self._records: dict[Sample, _Record] = {}

    def judged(self, sample: Sample, verdict: Verdict) -> None:
        record = self._records.setdefault(sample, _Record())
        record.num_judged += verdict.num_judged
        record.num_accepted += verdict.num_accepted
        last = verdict.num_judged - 1
        drafted, target = verdict.draft.tokens[last], sample.tokens[verdict.position]
        if drafted == target:
            return
        distribution = verdict.distribution()[0]
        top = distribution.topk(min(TOP, len(distribution)))
        record.disagreements.append(
            {
                "position": verdict.position,
                "drafted": drafted,
                "target": target,
                "draft_confidence": _rounded(verdict.draft.confidences[last]),
                "target_confidence": _rounded(float(distribution[target])),
                "top": [
                    [token, _rounded(prob)]
                    for token, prob in zip(top.indices.tolist(), top.values.tolist(), strict=True)
                ],
            }
        )

    def ended(self, sample: Sample) -> None:
        """Its line; none where nothing was drafted. A sample that was pre-empted has one for each
        part."""
        record = self._records.pop(sample, None)
        if record is None:
            return
        request = sample.job.request
        line = {
            "session": request.details_for,
            "sample": sample.index,
            "seed": request.params.seed,
            "prompt_tokens": sample.job.num_prompt,
            "judged": record.num_judged,
            "accepted": record.num_accepted,
            "acceptance": _rounded(record.num_accepted / record.num_judged),
            "disagreements": record.disagreements,
        }
        if self._path.exists() and self._path.stat().st_size > self._max_bytes:
            self._path.replace(self._path.with_suffix(".before.jsonl"))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _rounded(share: float) -> float:
    return round(share, 5)
