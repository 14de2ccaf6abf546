"""What a run over several machines yields: tokens, and where its time went."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkercloud.core.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Round:
    """nodes: drafted tokens, of all branches; depth: the longest branch. accepted: of them; the
    target added one more where anything was drafted. cached: tokens before them that the target had
    computed in earlier rounds. prepared: whether the draft was there when it was asked for.
    began_s: since the run began; draft_s, verify_s: how long was waited for drafts, for the target.
    """

    nodes: int
    depth: int
    accepted: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int
    prepared: bool
    began_s: float
    draft_s: float
    verify_s: float


@dataclass(slots=True)
class PipelineResult:
    """tokens, logprobs, text: of the output, without the prompt. finish_reason: "stop", "length",
    "rounds" where there were no more rounds, "" while it runs. wall_s: of the whole run."""

    prompt: Sequence[int]
    params: SamplingParams
    rounds: list[Round] = field(default_factory=list[Round])
    text: str = ""
    finish_reason: str = ""
    wall_s: float = 0.0

    @property
    def tokens(self) -> list[int]:
        return [token for each in self.rounds for token in each.tokens]

    @property
    def logprobs(self) -> list[float]:
        return [logprob for each in self.rounds for logprob in each.logprobs]

    @property
    def acceptance(self) -> float:
        """The share of the drafted tokens that the target accepted; of a tree its longest branch
        counts. 0 without drafts."""
        drafted = sum(each.depth for each in self.rounds)
        return sum(each.accepted for each in self.rounds) / drafted if drafted else 0.0

    @property
    def hit_rate(self) -> float:
        """The share of the drafts that were there when they were asked for: prepared by the drafter
        while the target verified."""
        drafts = [each for each in self.rounds if each.nodes]
        return sum(each.prepared for each in drafts) / len(drafts) if drafts else 0.0

    @property
    def tokens_per_s(self) -> float:
        return len(self.tokens) / self.wall_s if self.wall_s else 0.0

    @property
    def summary(self) -> str:
        parts = [
            f"{len(self.tokens)} tokens in {self.wall_s:.2f} s",
            f"{self.tokens_per_s:.1f} tokens/s",
            f"{len(self.rounds)} rounds",
        ]
        drafted = sum(each.depth for each in self.rounds)
        if drafted:
            parts.append(f"{self.acceptance:.0%} of {drafted} drafted tokens accepted")
            parts.append(f"{self.hit_rate:.0%} of the drafts prepared")
        return "; ".join(parts) if drafted else "; ".join([*parts, "no drafts"])

    @property
    def spans(self) -> list[dict[str, Any]]:
        """Events of a Chrome trace, times in microseconds: one line for drafts, one for the
        target."""
        events: list[dict[str, Any]] = []
        for number, each in enumerate(self.rounds):
            began_us = 1e6 * each.began_s
            drafted_us = began_us + 1e6 * each.draft_s
            draft = {"nodes": each.nodes, "depth": each.depth, "prepared": each.prepared}
            verdict = {"accepted": each.accepted, "tokens": len(each.tokens)}
            events.append(_event(f"draft {number}", 1, began_us, 1e6 * each.draft_s, draft))
            events.append(_event(f"verify {number}", 2, drafted_us, 1e6 * each.verify_s, verdict))
        return events

    def record(self) -> dict[str, Any]:
        """Without texts and tokens: what may be shown to others."""
        return {
            "prompt_tokens": len(self.prompt),
            "tokens": len(self.tokens),
            "finish_reason": self.finish_reason,
            "wall_s": self.wall_s,
            "acceptance": self.acceptance,
            "hit_rate": self.hit_rate,
            "rounds": [
                {
                    "nodes": each.nodes, "depth": each.depth, "accepted": each.accepted,
                    "tokens": len(each.tokens), "cached": each.cached, "prepared": each.prepared,
                    "began_s": each.began_s, "draft_s": each.draft_s, "verify_s": each.verify_s,
                }
                for each in self.rounds
            ],
        }  # fmt: skip


def write_telemetry(results: Sequence[PipelineResult], path: Path) -> None:
    """JSON: `runs`, and `traceEvents`, which Chrome's about:tracing and Perfetto draw."""
    events: list[dict[str, Any]] = []
    for number, result in enumerate(results):
        events += [{**event, "pid": number} for event in result.spans]
    whole = {"runs": [result.record() for result in results], "traceEvents": events}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def _event(
    name: str, line: int, start_us: float, spent_us: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name, "ph": "X", "tid": line, "ts": round(start_us), "dur": round(spent_us),
        "args": args,
    }  # fmt: skip
