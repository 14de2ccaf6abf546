"""Drafting from text seen before: a suffix automaton of what a group of samples has written.

An automaton of n tokens has at most 2n states and is made in O(n) (Blumer et al. 1985). Each state
stands for the strings that end at the same places, and counts them, so that a continuation comes
with the share of the times that it followed. Nothing is trained.
"""

from dataclasses import dataclass

ROOT = 0
COUNTED_LINKS = 16  # suffixes of a new token that are counted: all but in text of one token


class Automaton:
    """Every substring of the texts that were added, with how often it occurs."""

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]
        self._last = ROOT

    def __len__(self) -> int:
        """States."""
        return len(self._next)

    def begin(self) -> None:
        """What is added from here on does not continue what came before."""
        self._last = ROOT

    def add(self, token: int) -> None:
        state = self._extend(token)
        self._last = state
        for _ in range(COUNTED_LINKS):
            if state == ROOT:
                break
            self._count[state] += 1
            state = self._link[state]

    def _extend(self, token: int) -> int:
        known = self._next[self._last].get(token)
        if known is not None:  # an earlier text went on like this
            exact = self._length[known] == self._length[self._last] + 1
            return known if exact else self._split(self._last, known, token)
        state = self._new(self._length[self._last] + 1, {}, ROOT, 0)
        at = self._last
        while at != -1 and token not in self._next[at]:
            self._next[at][token] = state
            at = self._link[at]
        if at != -1:
            known = self._next[at][token]
            exact = self._length[known] == self._length[at] + 1
            self._link[state] = known if exact else self._split(at, known, token)
        return state

    def _split(self, at: int, known: int, token: int) -> int:
        """The shorter strings of `known`, which from now on end at more places than the others."""
        copy = self._new(
            self._length[at] + 1, dict(self._next[known]), self._link[known], self._count[known]
        )
        self._link[known] = copy
        while at != -1 and self._next[at].get(token) == known:
            self._next[at][token] = copy
            at = self._link[at]
        return copy

    def _new(self, length: int, following: dict[int, int], link: int, count: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        return len(self._next) - 1

    def follow(self, place: "Place", token: int) -> "Place":
        """The longest suffix of `place` and `token` that was seen."""
        state, length = place.state, place.length
        while state != -1 and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state] if state != -1 else 0
        return Place(self._next[state][token], length + 1) if state != -1 else Place()

    def continuation(self, place: "Place", most: int, share: float) -> list[int]:
        """What most often followed, token by token, while it did so at least `share` of the times;
        of equals the one that was seen first."""
        tokens: list[int] = []
        state, certain = place.state, 1.0
        while len(tokens) < most and self._next[state]:
            token, following = max(self._next[state].items(), key=lambda edge: self._count[edge[1]])
            times = sum(self._count[s] for s in self._next[state].values())
            certain *= self._count[following] / times
            if certain < share:
                break
            tokens.append(token)
            state = following
        return tokens


@dataclass(frozen=True, slots=True)
class Place:
    """Where a text is in an automaton: `length` of its last tokens are a string of `state`."""

    state: int = ROOT
    length: int = 0
