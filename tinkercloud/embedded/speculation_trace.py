"""Each round of speculation as lines of JSON, for those who want to see it drafted and judged."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tinkercloud.embedded.sequences import Sequence as Sample
from tinkercloud.speculative.drafter import Draft
from tinkercloud.speculative.rounds import Times


@dataclass(frozen=True, slots=True)
class TracedDraft:
    sample: Sample
    draft: Draft
    verified: int
    accepted: int


class Trace:
    """Writes a line for each draft that was verified; flushed with every round."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._round = 0

    def round(
        self, drafter: str, kind: str, drafts: Sequence[TracedDraft], times: Times
    ) -> None:
        self._round += 1
        for one in drafts:
            tokens = one.sample.tokens
            judged = min(one.verified, one.accepted + 1)
            at = len(tokens) - one.accepted - 1  # of the first drafted token
            told = {
                "round": self._round,
                "drafter": drafter,
                "kind": kind,
                "sample": one.sample.index,
                "position": at,
                "drafted": list(one.draft.tokens[: one.verified]),
                "confidences": [round(c, 4) for c in one.draft.confidences[: one.verified]],
                "target": tokens[at : at + judged],
                "accepted": one.accepted,
                "draft_ms": round(times.draft_ms, 3),
                "verify_ms": round(times.target_ms, 3),
            }
            self._file.write(json.dumps(told) + "\n")
        self._file.flush()
