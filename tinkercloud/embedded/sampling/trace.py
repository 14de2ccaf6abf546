"""A log of speculation, one line of JSON for each verified draft."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkercloud.embedded.sampling.sequences import Sequence as Sample
from tinkercloud.speculative.draft_length.rounds import Times
from tinkercloud.speculative.drafters.drafter import Draft


@dataclass(frozen=True, slots=True)
class TracedDraft:
    """ended: the sample ended with an accepted token, so that the target added none."""

    sample: Sample
    draft: Draft
    num_verified: int
    num_accepted: int
    ended: bool

    def as_json(self) -> dict[str, Any]:
        """target: the target's tokens, up to the first that differs from the drafted one."""
        tokens, num_new = self.sample.tokens, self.num_accepted + 1 - self.ended
        first, num_judged = len(tokens) - num_new, min(self.num_verified, num_new)
        confidences = self.draft.confidences[: self.num_verified]
        return {
            "sample": self.sample.index,
            "position": first,  # of the first drafted token
            "drafted": list(self.draft.tokens[: self.num_verified]),
            "confidences": [round(confidence, 4) for confidence in confidences],
            "target": tokens[first : first + num_judged],
            "accepted": self.num_accepted,
        }


class Trace:
    """Writes a line for each draft that was verified."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._round = 0

    def round(self, drafter: str, kind: str, drafts: Sequence[TracedDraft], times: Times) -> None:
        self._round += 1
        shared = {
            "round": self._round,
            "drafter": drafter,
            "kind": kind,
            "draft_ms": round(times.draft_ms, 3),
            "verify_ms": round(times.target_ms, 3),
        }
        with self._path.open("a", encoding="utf-8") as file:
            for draft in drafts:
                file.write(json.dumps({**shared, **draft.as_json()}) + "\n")
