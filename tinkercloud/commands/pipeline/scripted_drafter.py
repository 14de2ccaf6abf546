"""A drafter with a given rate of accepted tokens and a given time for each draft."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinkercloud.commands.pipeline.spans import Span
from tinkercloud.speculative.drafters.drafter import NO_DRAFT, Draft, Drafter, Stream


@dataclass(frozen=True, slots=True)
class Script:
    """tokens: a prompt with its sample. accepted: the share of places where it drafts the sample's
    token; second: of the other places, where that is its second candidate. token_s: of a step,
    whatever the number of drafts."""

    tokens: Sequence[int]
    accepted: float
    second: float
    token_s: float


class ScriptedDrafter(Drafter):
    """In a place of the sample it is always right or always wrong, the same in every run; off the
    sample it drafts nothing that matters. It sleeps in place of computing, since it stands for
    another machine."""

    name = "scripted"

    def __init__(self, script: Script):
        self._script = script
        self.spans: list[Span] = []

    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        drafts = self._drafts("draft", [(stream.tokens, most) for stream, most in requests])
        assert drafts is not None
        return drafts

    def propose_after(
        self, requests: Sequence[tuple[Stream, Sequence[int], int]], is_stale: Callable[[], bool]
    ) -> list[Draft] | None:
        each = [([*stream.tokens, *after], most) for stream, after, most in requests]
        return self._drafts("prepare", each, is_stale)

    def _drafts(
        self, name: str, requests: Sequence[tuple[Sequence[int], int]],
        is_stale: Callable[[], bool] = lambda: False,
    ) -> list[Draft] | None:  # fmt: skip
        start_s = time.monotonic()
        drafts = [self._draft(tokens, most) for tokens, most in requests]
        for step in range(1, 1 + max(most for _, most in requests)):
            time.sleep(max(0.0, start_s + step * self._script.token_s - time.monotonic()))
            if is_stale():
                self.spans.append(Span(f"{name}, stale", start_s, time.monotonic()))
                return None
        self.spans.append(Span(name, start_s, time.monotonic()))
        return drafts

    def _draft(self, tokens: Sequence[int], most: int) -> Draft:
        script, first = self._script, len(tokens)
        if list(script.tokens[:first]) != list(tokens):
            return Draft((0,) * most, (script.accepted,) * most, seconds=(1,) * most)
        going = script.tokens[first : first + most]
        if not going:
            return NO_DRAFT
        drafted, seconds = [], []
        for place, token in enumerate(going, first):
            coins = random.Random(place)
            is_right, is_second = coins.random() < script.accepted, coins.random() < script.second
            drafted.append(token if is_right else token + 1)
            seconds.append(token if is_second and not is_right else token + 2)
        return Draft(tuple(drafted), (script.accepted,) * len(drafted), seconds=tuple(seconds))
