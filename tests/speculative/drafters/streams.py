"""Samples for drafters to follow, whose tokens are known beforehand."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from tinkercloud.core.types import SamplingParams
from tinkercloud.speculative.drafters.drafter import Draft, Drafter, Stream


def stream(number: int, prompt: Sequence[int], group: Hashable = "group", epoch: int = 0) -> Stream:
    return Stream(
        id=number,
        group=group,
        version=f"version {epoch}",
        epoch=epoch,
        tokens=list(prompt),
        num_prompt=len(prompt),
        params=SamplingParams(None, 0),
        sample_index=number,
    )


@dataclass
class Tally:
    """rounds: forwards of the target. emitted, drafted, accepted: tokens."""

    rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    drafts: list[Draft] = field(default_factory=list)

    @property
    def acceptance(self) -> float:
        return self.accepted / max(1, self.drafted)

    @property
    def tokens_per_round(self) -> float:
        return self.emitted / max(1, self.rounds)


def written(
    drafter: Drafter, samples: Sequence[tuple[Stream, Sequence[int]]], most: int = 8
) -> Tally:
    """The samples side by side, each written to the end of its text, with what the drafter says."""
    tally = Tally()
    for sample, _ in samples:
        drafter.begin(sample)
    while live := [(s, text) for s, text in samples if len(s.tokens) - s.num_prompt < len(text)]:
        drafts = drafter.propose([(sample, most) for sample, _ in live])
        for (sample, text), draft in zip(live, drafts, strict=True):
            rest = text[len(sample.tokens) - sample.num_prompt :]
            emit(drafter, sample, rest, draft, tally)
    for sample, _ in samples:
        drafter.end(sample)
    return tally


def emit(drafter: Drafter, sample: Stream, rest: Sequence[int], draft: Draft, tally: Tally) -> None:
    accepted = 0
    while accepted < min(len(draft.tokens), len(rest)) and draft.tokens[accepted] == rest[accepted]:
        accepted += 1
    new = rest[: accepted + 1]
    sample.tokens.extend(new)
    drafter.observe(sample, len(new))
    tally.rounds += 1
    tally.emitted += len(new)
    tally.drafted += min(len(draft.tokens), len(rest))
    tally.accepted += accepted
    tally.drafts.append(draft)
