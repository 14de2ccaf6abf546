"""A drafter that is right as often as it is told to be, and takes as long as it is told to."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tinkercloud.speculative.drafters.drafter import NO_DRAFT, Draft, Drafter, Stream


@dataclass(frozen=True, slots=True)
class Script:
    """known: prompts with their samples. accepted: the share of places where it drafts the sample's
    token; second: of the other places, where that is its second candidate. token_s: of a step."""

    known: Sequence[Sequence[int]]
    accepted: float
    second: float
    token_s: float


@dataclass(frozen=True, slots=True)
class Span:
    """What it computed, by the clock `time.monotonic`, which all processes share."""

    name: str
    start_s: float
    end_s: float


class ScriptedDrafter(Drafter):
    """In a place it is always right, or always wrong: the same in every run. It sleeps in place of
    computing, since it stands for another machine. prepares: answers `propose_after`."""

    name = "scripted"

    def __init__(self, script: Script, *, prepares: bool):
        self._script, self._prepares = script, prepares
        self.spans: list[Span] = []

    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        return self._drafts("draft", [(stream.tokens, most) for stream, most in requests])

    def propose_after(self, requests: Sequence[tuple[Stream, Sequence[int], int]]) -> list[Draft]:
        if not self._prepares:
            return [NO_DRAFT] * len(requests)
        return self._drafts("prepare", [([*s.tokens, *after], n) for s, after, n in requests])

    def _drafts(self, name: str, requests: Sequence[tuple[Sequence[int], int]]) -> list[Draft]:
        start_s = time.monotonic()
        drafts = [self._draft(tokens, most) for tokens, most in requests]
        taken_s = time.monotonic() - start_s
        computed_s = self._script.token_s * max(most for _, most in requests)
        time.sleep(max(0.0, computed_s - taken_s))
        self.spans.append(Span(name, start_s, time.monotonic()))
        return drafts

    def _draft(self, tokens: Sequence[int], most: int) -> Draft:
        first, script = len(tokens), self._script
        known = [each for each in script.known if list(each[:first]) == list(tokens)]
        going = list(known[0][first : first + most]) if known else [0] * most
        drafted, seconds = [], []
        for place, token in enumerate(going, first):
            coins = random.Random(place)
            is_right, is_second = coins.random() < script.accepted, coins.random() < script.second
            drafted.append(token if is_right else token + 1 if token == 0 else token - 1)
            seconds.append(token if is_second and not is_right else token + 2)
        confidences = (script.accepted,) * len(drafted)
        return Draft(tuple(drafted), confidences, seconds=tuple(seconds))
