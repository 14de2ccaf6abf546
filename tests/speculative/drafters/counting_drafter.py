"""What the suffix drafter promises, by counting all that was written anew for every draft."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tinkercloud.speculative.drafters.drafter import Draft, Drafter, Stream
from tinkercloud.speculative.drafters.suffix import ContinuationRule
from tinkercloud.speculative.drafters.suffix_drafter import LEAD
from tinkercloud.speculative.drafters.suffix_matches import SuffixSettings

Dated = list[tuple[int, int]]  # tokens, each with when it was written


@dataclass
class Written:
    stream: Stream
    dated: Dated = field(default_factory=list)


class CountingDrafter(Drafter):
    """Forgets nothing. Prompts are no longer than LEAD, and groups do not differ in them."""

    name = "counting"

    def __init__(self, settings: SuffixSettings) -> None:
        self._settings = settings
        self._samples: list[Written] = []
        self._now = 0

    def begin(self, stream: Stream) -> None:
        assert stream.num_prompt <= LEAD
        self._samples.append(Written(stream))
        self._write(self._samples[-1], stream.tokens)

    def observe(self, stream: Stream, num_new: int) -> None:
        sample = next(sample for sample in self._samples if sample.stream is stream)
        self._write(sample, stream.tokens[len(stream.tokens) - num_new :])

    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        return [self._draft(stream, most) for stream, most in requests]

    def _write(self, sample: Written, tokens: Sequence[int]) -> None:
        for token in tokens:
            sample.dated.append((token, self._now))
            self._now += 1

    def _draft(self, stream: Stream, most: int) -> Draft:
        best: tuple[int, list[Dated]] = (0, [])
        for texts in self._sources(stream):
            length = longest(texts, stream.tokens)
            if length > best[0]:
                best = length, texts
        length, texts = best
        most = min(most, int(self._settings.factor * length))
        return self._continued(texts, stream.tokens[len(stream.tokens) - length :], most)

    def _sources(self, stream: Stream) -> list[list[Dated]]:
        """Own output, prompt, and the group's texts of each version, the newest first."""
        group = [sample for sample in self._samples if sample.stream.group == stream.group]
        dated = next(sample for sample in group if sample.stream is stream).dated
        epochs = sorted({sample.stream.epoch for sample in group}, reverse=True)
        by_epoch = [[sample.dated for sample in group if sample.stream.epoch == e] for e in epochs]
        prompt, output = dated[: stream.num_prompt], dated[stream.num_prompt :]
        return [[output], [prompt], *by_epoch]

    def _continued(self, texts: list[Dated], end: list[int], most: int) -> Draft:
        rule = self._settings.rule
        tokens: list[int] = []
        shares: list[float] = []
        certain = 1.0
        while len(tokens) < most:
            end = end[len(end) - longest(texts, end) :]
            if len(end) < rule.shortest:
                break
            following = followers(texts, end)
            token = likeliest(following)
            followed = sum(other == token for other, _ in following)
            written = [[other for other, _ in text] for text in texts]
            share = smoothed(written, end, token, (followed, len(following)), rule)
            certain *= share
            if certain < rule.share:
                break
            tokens.append(token)
            shares.append(share)
            end = [*end, token]
        return Draft(tuple(tokens), tuple(shares))


def followers(texts: list[Dated], end: list[int]) -> Dated:
    """What followed `end`, wherever it is in the texts."""
    following: Dated = []
    for text in texts:
        tokens = [token for token, _ in text]
        for at in range(len(text) - len(end)):
            if tokens[at : at + len(end)] == end:
                following.append(text[at + len(end)])
    return following


def longest(texts: list[Dated], tokens: list[int]) -> int:
    """How many of the last tokens are somewhere in the texts and are followed there."""
    for length in range(len(tokens), 0, -1):
        if followers(texts, tokens[len(tokens) - length :]):
            return length
    return 0


def occurrences(texts: list[list[int]], text: list[int]) -> int:
    n = len(text)
    return sum(t[i : i + n] == text for t in texts for i in range(len(t) - n + 1))


def likeliest(following: Dated) -> int:
    """The token that is there most often, of equals the one that came first."""
    tokens = [token for token, _ in sorted(following, key=lambda dated: dated[1])]
    return max(dict.fromkeys(tokens), key=tokens.count)


def smoothed(
    texts: list[list[int]],
    end: list[int],
    token: int,
    counts: tuple[int, int],
    rule: ContinuationRule,
) -> float:
    """The token's share after `end`, which those after shorter ends that occur more often count
    in. counts: how often the token followed, and any."""
    shorter, often = end, occurrences(texts, end)
    for length in range(len(end) - 1, 0, -1):
        if occurrences(texts, end[len(end) - length :]) > often and rule.num_shorter:
            shorter = end[len(end) - length :]
            break
    if shorter is end:
        share, weight = 0.0, rule.doubt / len(end)
    else:
        counted = occurrences(texts, [*shorter, token]), occurrences(texts, shorter)
        one_less = replace(rule, num_shorter=rule.num_shorter - 1)
        share = smoothed(texts, shorter, token, counted, one_less)
        weight = rule.shorter / (1 + (len(end) / rule.long) ** 2)
    return (counts[0] + weight * share) / (counts[1] + weight)
