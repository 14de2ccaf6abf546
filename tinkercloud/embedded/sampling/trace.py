"""Each round of speculation as lines of JSON, for those who want to see it drafted and judged."""

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
    sample: Sample
    draft: Draft
    verified: int
    accepted: int
    ended: bool  # with a drafted token, none of the target's coming after

    def told(self) -> dict[str, Any]:
        """target: its own tokens, up to the first that is not the drafted one."""
        tokens, num_new = self.sample.tokens, self.accepted + 1 - self.ended
        at, judged = len(tokens) - num_new, min(self.verified, num_new)
        return {
            "sample": self.sample.index,
            "position": at,  # of the first drafted token
            "drafted": list(self.draft.tokens[: self.verified]),
            "confidences": [round(one, 4) for one in self.draft.confidences[: self.verified]],
            "target": tokens[at : at + judged],
            "accepted": self.accepted,
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
            for one in drafts:
                file.write(json.dumps({**shared, **one.told()}) + "\n")
